"""The renderer for any chat template, which proves each bridge on the spot or declines it.

The proof. Let F be the template's text of the new conversation, and P that of the earlier prompt, known by
its length and digest. F must begin with P. After it stands what the template makes of the earlier reply, up
to a control token that ends the turn; read back with the model's own parser this must be the recorded reply,
and so must the sampled ids themselves. (Arguments that are no JSON object may stand in F in the wrapping in
which a template got them that takes only objects.) Then the template has dropped and rewritten nothing, and
what it appends after the reply is the text from that control token on. Its ids depend on nothing before it,
because the tokenizer cuts the text at control tokens. So the bridge is: earlier ids, sampled ids, ids of that
text (less the control token, if the model has sampled it itself).

A control token in F is always the template's own: those in client text are marked (``tokenizer.py``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import Ids, ids
from polar.contract.chat import Chat
from polar.rendering.base import Declined, Prompt, RenderError, Turn
from polar.rendering.detect import family
from polar.rendering.messages import conversation, tool_objects
from polar.rendering.offered import OfferedTools
from polar.rendering.parsers import NewId, random_id, read, same_reply
from polar.rendering.plain import PlainText
from polar.rendering.reader import TemplateReader
from polar.rendering.template import ChatTemplate
from polar.rendering.tokenizer import Tokenizer, load_stop_ids, unmark
from polar.rendering.traits import probe

_NO_RESULTS = "it has no place for a tool's result: give one that has by --tokenizer FOLDER"


class PromptState(msgspec.Struct, frozen=True, array_like=True):
    """What a bridge must know of the prompt before it: the text's length and digest, digests of tools and
    template arguments, the template's clock (Unix seconds; a conversation keeps the one it began with),
    whether the prompt has opened the thinking and whether calls are read."""

    length: int
    digest: bytes
    tools: bytes
    args: bytes
    now: float
    opened: bool
    calls: bool


class TemplateRenderer:
    """A ``Renderer`` over a tokenizer and a chat template.

    Args:
        stop_ids: ids that end a reply, beside the ends of turn that the template itself writes.
        parser: the reply parser's name, instead of the one that reads the template's calls.
        new_id: makes tool call ids.
        clock: Unix seconds, for templates that write the date.

    Raises:
        UsageError: there is no such parser.
        RenderError: the template can't render one user message.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        stop_ids: frozenset[int] = frozenset(),
        parser: str | None = None,
        new_id: NewId = random_id,
        clock: Callable[[], float] = time.time,
    ) -> None:
        known = [text for stop in stop_ids if (text := tokenizer.token_text(stop))]
        tokenizer = Tokenizer(tokenizer.raw, control=known)
        self.traits = probe(template, tokenizer)
        self.family = family(template, self.traits, tokenizer, parser)
        self._ends = tuple(dict.fromkeys(filter(None, [*self.traits.turn_ends, self.family.call_end])))
        ends = {tokenizer.token_id(text) for text in self._ends if text != self.family.inner_end}
        self.stop_ids = stop_ids | frozenset(end for end in ends if end is not None)
        stops = [text for stop in self.stop_ids if (text := tokenizer.token_text(stop))]
        self.tokenizer = Tokenizer(tokenizer.raw, control=stops)
        self._template = template
        self._new_id = new_id
        self._clock = clock
        self._offered = OfferedTools(self.render, reads=self.family.calls is not None)

    @classmethod
    def load(cls, folder: Path, *, parser: str | None = None, template: str | None = None) -> TemplateRenderer:
        """The renderer of a model folder; ``template`` is Jinja text to use instead of the folder's.

        Raises:
            UsageError: the folder lacks a tokenizer or a template, or they can't be read.
        """
        tokenizer = Tokenizer.load(folder)
        chat_template = ChatTemplate.load(folder, template)
        return cls(tokenizer, chat_template, stop_ids=load_stop_ids(folder, tokenizer), parser=parser)

    def render(self, chat: Chat) -> Prompt:
        """The whole conversation, with the generation prompt."""
        now = self._clock()
        text = self._text(chat, now)
        state = self._state(chat, text, now)
        return Prompt(self.tokenizer.encode_prompt(text), state, state.opened)

    def bridge(self, turn: Turn, chat: Chat) -> Prompt | Declined:
        """The next prompt, or why there is none by this way."""
        state = turn.prompt.state
        if not isinstance(state, PromptState):
            return Declined("no_state")
        try:
            text = self._text(chat, state.now)
        except RenderError:
            return Declined("template_refuses")
        after = self._state(chat, text, state.now)
        if len(text) < state.length or _digest(text[: state.length]) != state.digest:
            return Declined(_why(state, after))
        tail = self._tail(turn, chat, text)
        if isinstance(tail, Declined):
            return tail
        return Prompt(np.concatenate([turn.prompt.ids, turn.response_ids, tail]), after, after.opened)

    def reader(self, chat: Chat, prompt: Prompt) -> TemplateReader:
        """A reader for the reply to a prompt of this renderer."""
        state = prompt.state
        tools = chat.tools if state.calls else ()
        parser = self.family.parser(self._new_id, tools=tools, opened=state.opened)
        return TemplateReader(self.tokenizer, parser, stop_ids=self.stop_ids, stop=chat.sampling.stop)

    def tools_lost(self, chat: Chat, prompt: Prompt) -> str | None:
        """Why the model can't use the tools that this call offers, if it can't."""
        state = prompt.state
        return self._offered.lost(chat, state.tools + state.args) if isinstance(state, PromptState) else None

    @property
    def plain(self) -> PlainText:
        """For prompts that are no conversation."""
        return PlainText(self.tokenizer, self.stop_ids)

    def _text(self, chat: Chat, now: float) -> str:
        protect = self.tokenizer.protect
        messages = conversation(chat.messages, self.traits, protect)
        tools = protect(tool_objects(chat.tools))
        try:
            return self._template.text(messages, tools, protect(chat.template_args), now=now)
        except RenderError as error:
            if self.traits.results or all(message.role != "tool" for message in chat.messages):
                raise
            raise RenderError(f"{error} ({_NO_RESULTS})") from None

    def _state(self, chat: Chat, text: str, now: float) -> PromptState:
        return PromptState(
            length=len(text),
            digest=_digest(text),
            tools=_digest_json(chat.tools),
            args=_digest_json(chat.template_args),
            now=now,
            opened=self.family.opens(text),
            calls=bool(chat.tools) and chat.tool_choice != "none",
        )

    def _tail(self, turn: Turn, chat: Chat, text: str) -> Ids | Declined:
        """Ids of what follows the sampled ids."""
        state: PromptState = turn.prompt.state
        response = turn.response_ids
        sampled_end = int(response[-1]) if len(response) and int(response[-1]) in self.stop_ids else None
        places = self._turn_ends(text, state.length, sampled_end)
        if not places:
            return Declined("no_turn_end")
        said = (self._says(turn, chat, unmark(text[state.length : place]), rendered=True) for place, _ in places)
        place, end = next((found for found, same in zip(places, said, strict=True) if same), (-1, ""))
        if place < 0:
            return Declined("template_rewrites_history")
        sampled = response if sampled_end is None else response[:-1]
        if not self._says(turn, chat, self.tokenizer.decode(sampled.tolist())):
            return Declined("reply_not_as_sampled")
        tail = self.tokenizer.encode(text[place:])
        if tail[0] != self.tokenizer.token_id(end):
            return Declined("no_turn_end")
        return ids(tail if sampled_end is None else tail[1:])

    def _turn_ends(self, text: str, start: int, sampled_end: int | None) -> list[tuple[int, str]]:
        """Where the reply's turn may end in the text, and with which token: at the first one like that which the
        model ended it with, else (cut off, aborted) at the first of each that the template ends turns with."""
        ends = self._ends
        if sampled_end is not None:
            ends = tuple(filter(None, [self.tokenizer.token_text(sampled_end)]))
        return sorted((place, end) for end in ends if (place := text.find(end, start)) >= 0)

    def _says(self, turn: Turn, chat: Chat, text: str, *, rendered: bool = False) -> bool:
        """Whether this text, read as a reply to the turn's prompt, is the recorded one; ``rendered``: the template
        made it."""
        state: PromptState = turn.prompt.state
        tools = chat.tools if state.calls else ()
        parser = self.family.parser(str, tools=tools, opened=state.opened)
        return same_reply(read(parser, text), chat.messages[turn.messages - 1], rendered=rendered)


def _why(before: PromptState, after: PromptState) -> str:
    if before.tools != after.tools:
        return "tools_changed"
    return "template_args_changed" if before.args != after.args else "template_rewrites_history"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _digest_json(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=16).digest()
