"""Why: a plain prompt (``/v1/completions``) has no messages by which it could hang in the context graph. It hangs
there by its tokens: a prompt that begins with all the ids of an earlier call, reply included, goes on with it.

Ids are taken as they are. Text goes on with an earlier call where its tokens do so by themselves, or where it begins
with that call's text and what follows is cut off from it by a control token; if not, it stands alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from polar.capture.graph import Attachment, SessionGraph
from polar.capture.prefixes import Prefixes
from polar.contract.arrays import Ids, ids
from polar.contract.chat import Chat, Message
from polar.contract.completion import Completion
from polar.dialects.base import CallError
from polar.rendering.base import Prompt
from polar.rendering.plain import PlainText

OFF_LOOP = 64 * 1024
"""Characters of a prompt from which it is encoded in a thread, so that it does not hold up other calls."""


@dataclass(frozen=True, slots=True)
class PlainState:
    """The text of a plain prompt, as its client sent it."""

    text: str


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A plain prompt in its place: the ids, and why they do not extend an earlier call's, if that can be said."""

    attachment: Attachment
    prompt: Prompt
    declined: str | None = None


@dataclass
class PlainIndex:
    """The calls of a session by their ids and by their text; it takes in what is new when it is asked."""

    by_ids: Prefixes[Completion] = field(default_factory=Prefixes)
    by_prompt: Prefixes[Completion] = field(default_factory=Prefixes)
    by_text: Prefixes[Completion] = field(default_factory=Prefixes)
    seen: int = 0

    def take_in(self, graph: SessionGraph, states: dict[str, object], plain: PlainText) -> None:
        """The calls that have ended since the last time."""
        for completion in graph.completions()[self.seen :]:
            self.seen += 1
            if not completion.total_len:
                continue
            whole = graph.ids(completion.completion_id)
            self.by_prompt.add(_bytes(whole[: completion.prompt_len]), completion)
            if not len(completion.response_ids):
                continue
            self.by_ids.add(_bytes(whole), completion)
            state = states.get(completion.completion_id)
            if isinstance(state, PlainState):
                text = state.text + plain.decode(completion.response_ids.tolist())
                self.by_text.add(_text_bytes(text), completion)


async def plain_ids(chat: Chat, plain: PlainText | None) -> Ids:
    """The ids of a plain prompt by itself.

    Raises:
        CallError: ``bad_request``: there is no tokenizer to read the reply with, or the prompt is empty.
    """
    if plain is None:
        raise CallError(
            "bad_request",
            "Plain completions need an engine that takes token ids, and its tokenizer (--tokenizer): send messages "
            "to /v1/chat/completions",
        )
    sent = chat.prompt or ()
    if not isinstance(sent, str):
        return _not_empty(ids(sent))
    special = chat.template_args.get("add_special_tokens") is not False
    if len(sent) > OFF_LOOP:
        return _not_empty(await asyncio.to_thread(plain.encode, sent, special=special))
    return _not_empty(plain.encode(sent, special=special))


def place_plain(
    chat: Chat, prompt: Ids, graph: SessionGraph, states: dict[str, object], index: PlainIndex, plain: PlainText
) -> PlainPrompt:
    """Where a plain prompt hangs in the graph, and its ids there.

    Args:
        prompt: its ids by itself; what it goes on with may have the same text in other ids.
    """
    index.take_in(graph, states, plain)
    sent = chat.prompt
    state, declined = None, None
    parent = _parent(index, prompt)
    if isinstance(sent, str):
        state = PlainState(sent)
        longer = next(iter(index.by_text.find(_text_bytes(sent))), None)
        if longer is not None and (parent is None or longer.total_len > parent.total_len):
            extended = _extended(longer, sent, graph, states, plain)
            if extended is None:
                declined = "retokenized" if parent is None else None
            else:
                parent, prompt = longer, extended
    attachment = _attachment(parent, prompt, graph, index, plain)
    if parent is None and declined is None and attachment.base is not None:
        declined = "resampled" if attachment.base.prompt_len == len(prompt) else "history_edited"
    return PlainPrompt(attachment, Prompt(prompt, state), declined)


def _not_empty(prompt: Ids) -> Ids:
    if not len(prompt):
        raise CallError("bad_request", "'prompt' is empty: there is nothing to go on from")
    return prompt


def _parent(index: PlainIndex, prompt: Ids) -> Completion | None:
    return next(iter(index.by_ids.find(_bytes(prompt))), None)


def _extended(
    parent: Completion, sent: str, graph: SessionGraph, states: dict[str, object], plain: PlainText
) -> Ids | None:
    """The parent's ids and those of the text after it, where these can't depend on it."""
    state = states[parent.completion_id]
    assert isinstance(state, PlainState)
    before = graph.ids(parent.completion_id)
    said = state.text + plain.decode(parent.response_ids.tolist())
    tail = plain.tail(before, sent[len(said) :])
    return None if tail is None else np.concatenate([before, tail])


def _attachment(
    parent: Completion | None, prompt: Ids, graph: SessionGraph, index: PlainIndex, plain: PlainText
) -> Attachment:
    """What was given and what was sampled, in turns, as messages; for who reads the record."""
    if parent is not None:
        told = graph.conversation(parent)
        new = prompt[parent.total_len :].tolist()
        messages = (*told, *([Message("user", plain.decode(new))] if new else []))
        return Attachment(messages, parent, len(told), parent, len(told), graph.ids(parent.completion_id))
    messages = (Message("user", plain.decode(prompt.tolist())),)
    base = next(iter(index.by_prompt.find(_bytes(prompt))), None)
    if base is None:
        return Attachment(messages)
    return Attachment(messages, base=base, base_ids=graph.ids(base.completion_id))


def _bytes(tokens: Ids) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
