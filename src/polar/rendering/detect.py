"""Which parsers read a model's replies: found by having its template render a tool call.

A template says how its model writes a call. So each family's parser is given a rendered call to read, and
the one that gets it back is the model's. Nothing is guessed from a model's name. The control token up to which it
gets it back is the one that ends a reply with a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from polar.contract.chat import Message, Tool, ToolCall
from polar.contract.errors import UsageError
from polar.rendering import harmony, invoke, sections
from polar.rendering.base import RenderError
from polar.rendering.gemma import GemmaParser
from polar.rendering.glm import GlmParser
from polar.rendering.harmony import HarmonyParser
from polar.rendering.hermes import HermesParser
from polar.rendering.json_list import JsonListParser
from polar.rendering.llama3 import Llama3Parser
from polar.rendering.messages import conversation, tool_objects
from polar.rendering.mistral import MistralParser
from polar.rendering.parsers import THINKING, NewId, Parser, PlainParser, Tags, ThinkingParser, read, same_reply
from polar.rendering.qwen_xml import QwenXmlParser
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer
from polar.rendering.traits import Traits

CALL_PARSERS: dict[str, Callable[[NewId, Sequence[Tool]], Parser]] = {
    "hermes": lambda new_id, _: HermesParser(new_id),
    "llama3_json": lambda new_id, _: Llama3Parser(new_id),
    "qwen_xml": QwenXmlParser,
    "glm": GlmParser,
    "deepseek": lambda new_id, _: sections.deepseek(new_id),
    "deepseek_v32": invoke.deepseek_v32,
    "deepseek_v4": invoke.deepseek_v4,
    "kimi": lambda new_id, _: sections.kimi(new_id),
    "minimax": invoke.minimax,
    "mistral": lambda new_id, _: MistralParser(new_id),
    "json_list": lambda new_id, _: JsonListParser(new_id),
    "gemma": lambda new_id, _: GemmaParser(new_id),
    "harmony": HarmonyParser,
}

_WHOLE = {"harmony": harmony.INNER_END}
"""Parsers that read the whole reply, thinking included, and the token that ends a part of it."""

_CALL = ToolCall(id="call0prob", name="probe_function", arguments='{"probe": "value", "count": 3}')
_TOOL = Tool(
    name=_CALL.name,
    description="Probe.",
    parameters={"type": "object", "properties": {"probe": {"type": "string"}, "count": {"type": "integer"}}},
)
_LONGEST_TAG = 24


class Family(msgspec.Struct, frozen=True):
    """How a model writes. ``calls``: the parser of its tool calls (``None``: none that is known here);
    ``thinking``: what stands around its thinking, where that is read apart from the rest; ``call_end``: the
    control token that ends a reply with a call."""

    calls: str | None
    thinking: Tags | None
    call_end: str | None = None

    @property
    def inner_end(self) -> str | None:
        """A control token that ends a part of a reply, but not the reply."""
        return _WHOLE.get(self.calls or "")

    def parser(self, new_id: NewId, *, tools: Sequence[Tool], opened: bool) -> Parser:
        """A parser for one reply. ``tools``: what may be called; where there is nothing, calls are text.
        ``opened``: the prompt has begun the thinking."""
        inner: Parser = PlainParser()
        if self.calls and (tools or self.inner_end):
            inner = CALL_PARSERS[self.calls](new_id, tools)
        return ThinkingParser(inner, self.thinking, opened=opened) if self.thinking else inner

    def opens(self, prompt: str) -> bool:
        """Whether this prompt's text has begun the thinking."""
        return self.thinking is not None and prompt.rstrip().endswith(self.thinking.open.rstrip())


def family(template: ChatTemplate, traits: Traits, tokenizer: Tokenizer, name: str | None = None) -> Family:
    """The family of a template; ``name`` (one of CALL_PARSERS, or plain) overrides how calls are read.

    Raises:
        UsageError: there is no parser of that name.
    """
    thinking = next((tags for tags in THINKING if tags.close in template.source), None)
    if name is not None and name != "plain" and name not in CALL_PARSERS:
        raise UsageError(f"no reply parser '{name}': there are {', '.join([*CALL_PARSERS, 'plain'])}")
    if name == "plain":
        return Family(None, thinking)
    replies = list(_rendered_calls(template, traits, tokenizer))
    for calls in [name] if name else CALL_PARSERS:
        candidate = Family(calls, None if calls in _WHOLE else thinking)
        # The longest text that still is the call ends where the reply does; a parser that reads on and on says it
        # with the shortest.
        for text, before, expected, end in replies if calls in _WHOLE else reversed(replies):
            parser = candidate.parser(lambda: "", tools=[_TOOL], opened=candidate.opens(before))
            if same_reply(read(parser, text), expected):
                return msgspec.structs.replace(candidate, call_end=end)
    return Family(name, None if name in _WHOLE else thinking)


def _rendered_calls(
    template: ChatTemplate, traits: Traits, tokenizer: Tokenizer
) -> Iterator[tuple[str, str, Message, str | None]]:
    """What the template writes for a reply that is one tool call, with thinking and without: the text, what stands
    before it, the reply, and the control token up to which the text goes; the shortest first."""
    user = Message(role="user", content="Probe.")
    result = Message(role="tool", content="Probed.", tool_call_id=_CALL.id, name=_CALL.name)
    tools = tool_objects([_TOOL])
    for reasoning in (None, "Probing."):
        reply = Message(role="assistant", reasoning=reasoning, tool_calls=(_CALL,))
        try:
            prompt = template.text(conversation([user], traits, _as_it_is), tools)
            whole = template.text(conversation([user, reply, result], traits, _as_it_is), tools)
        except RenderError:
            return
        for start in _starts(prompt, whole):
            for place, end in _control_tokens(whole, start, tokenizer):
                for expected in (reply, msgspec.structs.replace(reply, reasoning=None)):
                    yield whole[start:place], whole[:start], expected, end


def _starts(prompt: str, whole: str) -> list[int]:
    """Where the reply may begin: where the conversation goes on behind the prompt, with the tag in which the two
    begin to differ, or behind that, if it closes a thought that the prompt did not open."""
    same = zip(prompt, whole, strict=False)
    start = next((place for place, (a, b) in enumerate(same) if a != b), min(len(prompt), len(whole)))
    before = whole[max(0, start - _LONGEST_TAG) : start]
    tag = max(before.rfind("<"), before.rfind("["))
    if tag < 0:
        return [start]
    tag += start - len(before)
    closes = [len(tags.close) for tags in THINKING if whole.startswith(tags.close, tag)]
    return [start, tag, *(tag + length for length in closes)]


def _control_tokens(text: str, start: int, tokenizer: Tokenizer) -> list[tuple[int, str | None]]:
    """The control tokens from ``start`` on, and the end of the text."""
    found: list[tuple[int, str | None]] = []
    place = start
    while match := tokenizer.control_at(text, place):
        found.append((match.start(), match.group()))
        place = match.end()
    return [*found, (len(text), None)]


def _as_it_is(value: object) -> object:
    return value
