"""How a call becomes tokens: by our own rendering (``tito``: ids in, ids out) or by the engine's (``chat``).

Both give the pipeline the same three events, in this order: the prompt as the engine has it, pieces of the
reply, and the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from polar.capture.graph import Attachment, SessionGraph
from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat, Delta, FinishReason, Image, Message, Usage
from polar.contract.completion import Mode, WeightSpan
from polar.dialects.base import CallError
from polar.engines.base import ChatEngine, Engine, EngineInfo, TokenEngine
from polar.rendering.base import Declined, Prompt, Renderer, RenderError, Turn

OFF_LOOP = 64 * 1024
"""Characters of a conversation from which it is rendered in a thread, so that it does not hold up other calls."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine's prompt ids, and why they do not extend the parent's, where the renderer said why.

    ``ids`` is ``None`` where the engine has not told them (yet); they come with ``Ended`` then."""

    ids: Ids | None
    declined: str | None = None
    state: object = None


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the reply: what the client sees, and the ids sampled since the last piece."""

    deltas: Sequence[Delta]
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    weight_version: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The reply is over. ``usage`` is the engine's own count, where it reports one."""

    message: Message
    finish_reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage | None = None
    cached_tokens: int = 0
    prompt_ids: Ids | None = None
    weight_spans: Sequence[WeightSpan] = field(default=())


Event = Begun | Piece | Ended


@dataclass(frozen=True, slots=True)
class Context:
    """What a backend may use to extend what came before. ``states`` are the renderer's, by completion id."""

    graph: SessionGraph
    attachment: Attachment
    states: dict[str, object]
    call_id: str
    affinity: str


class Backend(Protocol):
    """An engine, made ready for the pipeline."""

    @property
    def mode(self) -> Mode: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def info(self) -> EngineInfo: ...

    def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        """Sample a reply. Closing the iterator ends the generation.

        Raises:
            CallError: the conversation does not fit or can't be rendered.
            EngineError: the engine failed.
        """
        ...

    async def count(self, chat: Chat) -> int:
        """The prompt length of a conversation, without generating.

        Raises:
            CallError: it can't be told.
        """
        ...


class TitoBackend:
    """Token ids in, token ids out: Polar renders, so a prompt extends the exact tokens before it."""

    mode: Mode = "tito"

    def __init__(self, engine: TokenEngine, renderer: Renderer) -> None:
        self.engine = engine
        self._renderer = renderer

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        _refuse_images(chat)
        if _text_size(chat) > OFF_LOOP:
            prompt, declined = await asyncio.to_thread(self._prompt, chat, context)
        else:
            prompt, declined = self._prompt(chat, context)
        chat = self._fit(chat, len(prompt.ids))
        yield Begun(prompt.ids, declined, prompt.state)
        reader = self._renderer.reader(chat, prompt)
        finish: FinishReason = "abort"
        cached = 0
        generation = self.engine.generate(
            prompt.ids,
            chat.sampling,
            stop_ids=self._renderer.stop_ids,
            request_id=context.call_id,
            affinity=context.affinity,
        )
        try:
            async for chunk in generation:
                cached = max(cached, chunk.cached_tokens)
                yield Piece(reader.feed(chunk.ids), chunk.ids, chunk.logprobs, chunk.weight_version)
                if reader.stopped or chunk.finish_reason is not None:
                    finish = chunk.finish_reason or "stop"
                    break
        finally:
            await _close(generation)
        reply = reader.finish(finish)
        if reply.deltas:
            yield Piece(reply.deltas)
        yield Ended(reply.message, reply.finish_reason, reply.stop_sequence, cached_tokens=cached)

    async def count(self, chat: Chat) -> int:
        _refuse_images(chat)
        return len((await asyncio.to_thread(self._render, chat)).ids)

    def _prompt(self, chat: Chat, context: Context) -> tuple[Prompt, str | None]:
        """The exact extension of the parent where the renderer can prove one, else the whole rendering."""
        parent = context.attachment.parent
        if parent is None:
            return self._render(chat), None
        if not len(parent.response_ids) or not parent.prompt_len:
            return self._render(chat), "parent_without_ids"
        before_ids = context.attachment.base_ids[: parent.prompt_len]
        before = Prompt(before_ids, context.states.get(parent.completion_id))
        turn = Turn(before, parent.response_ids, context.attachment.parent_messages)
        try:
            bridged = self._renderer.bridge(turn, chat)
        except RenderError as error:
            raise CallError("bad_request", f"The chat template refuses this conversation: {error}") from None
        if isinstance(bridged, Declined):
            return self._render(chat), bridged.reason
        return bridged, None

    def _render(self, chat: Chat) -> Prompt:
        try:
            return self._renderer.render(chat)
        except RenderError as error:
            raise CallError("bad_request", f"The chat template refuses this conversation: {error}") from None

    def _fit(self, chat: Chat, prompt_tokens: int) -> Chat:
        """Clamp ``max_tokens`` to what the context still holds."""
        room = self.info.context_length - prompt_tokens
        if room < 1:
            raise CallError(
                "context_length",
                f"The prompt has {prompt_tokens} tokens; the model takes {self.info.context_length}.",
                prompt_tokens=prompt_tokens,
                max_tokens=self.info.context_length,
            )
        wanted = chat.sampling.max_tokens
        limit = room if wanted is None else max(1, min(wanted, room))
        return msgspec.structs.replace(chat, sampling=msgspec.structs.replace(chat.sampling, max_tokens=limit))


class ChatBackend:
    """The engine renders and parses; Polar records the ids that it says it used."""

    mode: Mode = "chat"

    def __init__(self, engine: ChatEngine) -> None:
        self.engine = engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        chat = msgspec.structs.replace(chat, model=self.info.model)
        prompt_ids: Ids | None = None
        begun = False
        reply = self.engine.chat(
            chat,
            request_id=context.call_id,
            affinity=context.affinity,
            stream=stream,
            expected=context.attachment.base_ids,
        )
        try:
            async for chunk in reply:
                if chunk.prompt_ids is not None:
                    prompt_ids = chunk.prompt_ids
                if not begun:
                    begun = True
                    yield Begun(prompt_ids)
                yield Piece(chunk.deltas, chunk.ids, chunk.logprobs)
                if chunk.finish_reason is not None:
                    yield Ended(
                        message=chunk.message or Message("assistant"),
                        finish_reason=chunk.finish_reason,
                        stop_sequence=chunk.stop_sequence,
                        usage=chunk.usage,
                        cached_tokens=chunk.usage.cached_tokens if chunk.usage else 0,
                        prompt_ids=prompt_ids if prompt_ids is not None else NO_IDS,
                        weight_spans=chunk.weight_spans,
                    )
        finally:
            await _close(reply)

    async def count(self, chat: Chat) -> int:
        raise CallError("not_found", "This engine is used in chat mode and can't count tokens beforehand")


def _text_size(chat: Chat) -> int:
    """Characters of the conversation, roughly."""
    return sum(len(message.content) for message in chat.messages)


def _refuse_images(chat: Chat) -> None:
    """Token ids can't carry pixels: a model that saw only a placeholder would answer from nothing."""
    if any(isinstance(m.content, tuple) and any(isinstance(p, Image) for p in m.content) for m in chat.messages):
        raise CallError("bad_request", "Images can't be sent as token ids: use an engine in --mode chat for them")


async def _close(iterator: AsyncIterator[object]) -> None:
    """Close a generator now, so that the engine's slot is free now and not when it is collected."""
    close = getattr(iterator, "aclose", None)
    if close is not None:
        await close()
