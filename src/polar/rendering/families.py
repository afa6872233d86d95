"""Hand-written renderers of the ``renderers`` package, for models whose template can't be rendered or read here.

The package knows many families token by token but trusts its caller on two points that are checked here:
that tools and template arguments stay the same, and that a bridge begins with the exact earlier ids. Its
parsers read whole replies, so nothing is given out before the end, and arguments that it has parsed are
JSON again but not the very text that was sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polar.contract.chat import Chat, Delta, FinishReason, ReasoningDelta, TextDelta
from polar.contract.errors import MissingExtra, UsageError
from polar.rendering.base import Declined, Prompt, RenderError, Reply, Turn
from polar.rendering.messages import conversation, join_text, tool_objects
from polar.rendering.offered import OfferedTools
from polar.rendering.parsers import NewId, PlainParser, call_deltas, fold, random_id
from polar.rendering.plain import PlainText
from polar.rendering.reader import TemplateReader
from polar.rendering.tokenizer import Tokenizer, read_json
from polar.rendering.traits import Traits

_BY_MODEL_TYPE = {
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "minimax_m2": "minimax-m2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_moe": "qwen3",
}

_TRAITS = Traits(
    text_parts=False,
    images=False,
    system=True,
    late_system=True,
    neighbours=True,
    object_arguments=True,
    reasoning_fields=("reasoning_content",),
    inline_reasoning=False,
    turn_ends=(),
)


class FamilyRenderer:
    """A ``Renderer`` over a renderer of the package.

    Args:
        name: the package's name of the family (``qwen3``, ``gpt-oss``, ...).

    Raises:
        MissingExtra: the package is not installed.
        UsageError: the family is unknown, or does not fit the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, name: str, *, new_id: NewId = random_id) -> None:
        self.tokenizer = tokenizer
        self._name = name
        self._new_id = new_id
        self._by_args: dict[bytes, Any] = {}
        self._offered = OfferedTools(self.render, reads=True)
        try:
            self.stop_ids: frozenset[int] = frozenset(self._inner({}).get_stop_token_ids())
        except RenderError as error:
            raise UsageError(f"no renderer '{name}' for this tokenizer: {error}") from None

    def render(self, chat: Chat) -> Prompt:
        """The whole conversation by the family's renderer.

        Raises:
            RenderError: the renderer refuses it, or a template argument is unknown to it.
        """
        inner, messages, tools = self._plain(chat)
        try:
            ids = inner.render_ids(messages, tools=tools, add_generation_prompt=True)
        except Exception as error:  # the package promises no types
            raise RenderError(str(error)) from error
        return Prompt(np.asarray(ids, dtype=np.int32), _inputs(chat))

    def bridge(self, turn: Turn, chat: Chat) -> Prompt | Declined:
        """The family's own bridge, if it begins with the exact earlier ids."""
        if turn.prompt.state != _inputs(chat):
            return Declined("tools_changed")
        inner, messages, tools = self._plain(chat)
        before, response = turn.prompt.ids.tolist(), turn.response_ids.tolist()
        try:
            rendered = inner.bridge_to_next_turn(before, response, messages[turn.messages :], tools=tools)
        except Exception:
            return Declined("template_refuses")
        if rendered is None:
            return Declined("template_rewrites_history")
        ids = list(rendered.token_ids)
        if ids[: len(before) + len(response)] != before + response:
            return Declined("no_turn_end")
        return Prompt(np.asarray(ids, dtype=np.int32), turn.prompt.state)

    def reader(self, chat: Chat, prompt: Prompt) -> FamilyReader:
        """A reader for the reply to this prompt."""
        inner, _, tools = self._plain(chat)
        tools = tools if chat.tool_choice != "none" else None

        def parse(ids: Sequence[int]) -> Any:
            return inner.parse_response(list(ids), tools=tools, prompt_ids=prompt.ids.tolist())

        return FamilyReader(self.tokenizer, parse, self._new_id, self.stop_ids, chat.sampling.stop)

    def tools_lost(self, chat: Chat, prompt: Prompt) -> str | None:
        """Why the model can't use the tools that this call offers, if it can't."""
        return self._offered.lost(chat, prompt.state) if isinstance(prompt.state, bytes) else None

    @property
    def plain(self) -> PlainText:
        """For prompts that are no conversation."""
        return PlainText(self.tokenizer, self.stop_ids)

    def _plain(self, chat: Chat) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]] | None]:
        """The package's renderer, messages and tools, control tokens in client text marked as such."""
        protect = self.tokenizer.protect
        tools = tool_objects(chat.tools)
        messages = conversation(chat.messages, _TRAITS, protect)
        return self._inner(chat.template_args), messages, protect(tools) or None

    def _inner(self, args: dict[str, Any]) -> Any:
        key = msgspec.json.encode(args)
        if key not in self._by_args:
            try:
                import renderers
                from renderers.base import template_field_names
            except ImportError:
                raise MissingExtra(f"the {self._name} renderer", "renderers") from None
            try:
                config = renderers.config_from_name(self._name)
                known = template_field_names(config)  # a template passes over the others, the package refuses them
                heeded = {name: value for name, value in args.items() if name in known}
                shim = _Shim(self.tokenizer, self._name)
                self._by_args[key] = renderers.create_renderer(shim, config, chat_template_kwargs=heeded)
            except Exception as error:  # the package promises no types
                raise RenderError(str(error)) from error
        return self._by_args[key]


class FamilyReader:
    """A ``ReplyReader`` that gives everything out at the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        parse: Callable[[Sequence[int]], Any],
        new_id: NewId,
        stop_ids: frozenset[int],
        stop: Sequence[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._parse = parse
        self._new_id = new_id
        self._text = TemplateReader(tokenizer, PlainParser(), stop_ids=stop_ids, stop=stop)
        self._ids: list[int] = []

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._text.stopped

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """More ids. Nothing is given out yet."""
        if not self.stopped:
            self._ids.extend(ids)
            self._text.feed(ids)
        return []

    def finish(self, finish_reason: FinishReason) -> Reply:
        """The reply, parsed by the family's parser."""
        text = self._text.finish(finish_reason)
        # Text cut at a stop string has no ids of its own; these serve the parser alone.
        ids = self._tokenizer.encode(join_text(text.message)) if self.stopped else self._ids
        deltas = _deltas(self._parse(ids), self._new_id)
        message = fold(deltas)
        reason = text.finish_reason
        if reason == "stop" and message.tool_calls:
            reason = "tool_calls"
        return Reply(message, reason, text.stop_sequence, tuple(deltas))


class _Shim:
    """What the package needs of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        return self._tokenizer.decode([ids] if isinstance(ids, int) else list(ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.raw.token_to_id(tokens)
        return [self._tokenizer.raw.token_to_id(token) for token in tokens]


def family_of(folder: Path) -> str | None:
    """The package's name for the model in a folder, by its ``model_type``; ``None`` if it is not known."""
    return _BY_MODEL_TYPE.get(str(read_json(folder / "config.json").get("model_type")))


def _deltas(parsed: Any, new_id: NewId) -> list[Delta]:
    out: list[Delta] = []
    if parsed.reasoning_content:
        out.append(ReasoningDelta(parsed.reasoning_content))
    broken = "".join(call.raw for call in parsed.tool_calls if not call.name)
    if parsed.content or broken:
        out.append(TextDelta((parsed.content or "") + broken))
    for index, call in enumerate(call for call in parsed.tool_calls if call.name):
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        out += call_deltas(index, call.name, arguments, new_id())
    return out


def _inputs(chat: Chat) -> bytes:
    """What must stay the same for a bridge, beside the messages."""
    data = msgspec.json.encode([chat.tools, chat.template_args])
    return hashlib.blake2b(data, digest_size=16).digest()
