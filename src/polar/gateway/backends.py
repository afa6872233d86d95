"""How a call becomes tokens: by our own rendering (``tito``: ids in, ids out) or by the engine's (``chat``).

Both give the pipeline the same three events, in this order: the prompt as the engine has it, pieces of the
reply, and the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from polar.capture.graph import Attachment
from polar.capture.verify import doubt_end
from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat, Delta, FinishReason, Message, Text, Usage
from polar.contract.completion import Mode, WeightSpan
from polar.dialects.base import CallError
from polar.engines.base import (
    ChatChunk,
    ChatEngine,
    CountingEngine,
    Engine,
    EngineError,
    EngineInfo,
    TokenEngine,
    close_now,
)
from polar.gateway.constraints import heed
from polar.gateway.continuing import Continuing
from polar.gateway.inference import Admission
from polar.gateway.plain_prompts import PlainPrompt
from polar.rendering.base import Declined, Prompt, Renderer, RenderError, Turn
from polar.rendering.plain import PlainText

OFF_LOOP = 64 * 1024
"""Characters of a conversation from which it is rendered in a thread, so that it does not hold up other calls."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The engine's prompt ids, and why they do not extend the parent's, where the renderer said why.

    ``ids`` is ``None`` where the engine has not told them (yet); they come with ``Ended`` then. ``warnings`` are
    lines on what was asked for and is not heeded; ``constrained``: a grammar binds the reply."""

    ids: Ids | None
    declined: str | None = None
    state: object = None
    warnings: tuple[str, ...] = ()
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """More of the reply: what the client sees, and the ids sampled since the last piece. The engine names their
    weight version with them, or in ``weight_spans`` later: spans of the reply's ids, these or earlier ones."""

    deltas: Sequence[Delta]
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    weight_version: str | None = None
    weight_spans: Sequence[WeightSpan] = field(default=())


@dataclass(frozen=True, slots=True)
class Ended:
    """The reply is over. ``usage`` is the engine's own count, where it reports one; ``limit`` is how many ids the
    reply could have had, where that is known; ``stops`` is how often the engine stopped it before it went on;
    ``doubt`` is why its ids are not just those that were sampled, where that shows; ``warnings`` are lines on what
    could not be found out."""

    message: Message
    finish_reason: FinishReason
    stop_sequence: str | None = None
    usage: Usage | None = None
    cached_tokens: int = 0
    prompt_ids: Ids | None = None
    limit: int | None = None
    stops: int = 0
    doubt: str | None = None
    warnings: tuple[str, ...] = ()


Event = Begun | Piece | Ended


@dataclass(frozen=True, slots=True)
class Context:
    """What a backend may use to extend what came before. ``states`` are the renderer's, by completion id;
    ``admission`` is the call's place at the engine; ``plain`` the prompt, where it is no conversation."""

    attachment: Attachment
    states: dict[str, object]
    call_id: str
    affinity: str
    admission: Admission
    plain: PlainPrompt | None = None


class Backend(Protocol):
    """An engine, made ready for the pipeline."""

    @property
    def mode(self) -> Mode: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def plain(self) -> PlainText | None:
        """For prompts that are no conversation, where such can be sent."""
        ...

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
            EngineError: the engine failed.
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

    @property
    def plain(self) -> PlainText | None:
        return self._renderer.plain

    async def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        if _text_size(chat) > OFF_LOOP:
            prompt, declined, tools_lost = await asyncio.to_thread(self._begin, chat, context)
        else:
            prompt, declined, tools_lost = self._begin(chat, context)
        chat, warnings = heed(chat, self.info, thinking=prompt.opened, tools_lost=tools_lost)
        chat = fit(chat, len(prompt.ids), self.info)
        yield Begun(prompt.ids, declined, prompt.state, warnings, constrained=chat.response_format is not None)
        stop = chat.sampling.stop
        reader = self._renderer.plain.reader(stop) if context.plain else self._renderer.reader(chat, prompt)
        finish: FinishReason = "stop"
        last: int | None = None
        doubt: str | None = None
        sampling = Continuing(
            self.engine,
            prompt.ids,
            chat.sampling,
            stop_ids=self._renderer.stop_ids,
            call_id=context.call_id,
            affinity=context.affinity,
            admission=context.admission,
            response_format=chat.response_format,
            stream=stream,
        )
        async with aclosing(sampling.chunks()) as chunks:
            async for chunk in chunks:
                deltas = reader.feed(chunk.ids)
                yield Piece(deltas, chunk.ids, chunk.logprobs, chunk.weight_version, chunk.weight_spans)
                last = chunk.ids[-1] if len(chunk.ids) else last
                doubt = doubt or chunk.doubt
                if reader.stopped or chunk.finish_reason is not None:
                    finish = chunk.finish_reason or "stop"
                    if finish == "stop" and not reader.stopped and chat.response_format is None:
                        ends = self._renderer.stop_ids
                        doubt = doubt or doubt_end(last, ends, stop_sequence=chunk.stop_sequence, asked=stop)
                    break
        reply = reader.finish(finish)
        if reply.deltas:
            yield Piece(reply.deltas)
        yield Ended(
            reply.message,
            reply.finish_reason,
            reply.stop_sequence,
            usage=None if reader.stopped else sampling.usage,
            cached_tokens=sampling.cached_tokens,
            limit=chat.sampling.max_tokens,
            stops=sampling.stops,
            doubt=doubt,
        )

    async def count(self, chat: Chat) -> int:
        return len((await asyncio.to_thread(self._render, chat)).ids)

    def _begin(self, chat: Chat, context: Context) -> tuple[Prompt, str | None, str | None]:
        """The prompt, why it is no extension, and why the tools are lost: that renders, too."""
        prompt, declined = self._prompt(chat, context)
        return prompt, declined, self._renderer.tools_lost(chat, prompt)

    def _prompt(self, chat: Chat, context: Context) -> tuple[Prompt, str | None]:
        """The exact extension of the parent where the renderer can prove one, else the whole rendering."""
        if context.plain is not None:
            return context.plain.prompt, context.plain.declined
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
        except (RenderError, RecursionError) as error:  # the second: what is nested too deep
            raise CallError("bad_request", f"The chat template refuses this conversation: {error}") from None
        if isinstance(bridged, Declined):
            return self._render(chat), bridged.reason
        return bridged, None

    def _render(self, chat: Chat) -> Prompt:
        try:
            return self._renderer.render(chat)
        except (RenderError, RecursionError) as error:  # the second: what is nested too deep
            raise CallError("bad_request", f"The chat template refuses this conversation: {error}") from None


class ChatBackend:
    """The engine renders and parses; Polar records the ids that it says it used."""

    mode: Mode = "chat"
    plain: PlainText | None = None

    def __init__(self, engine: ChatEngine) -> None:
        self.engine = engine

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        chat, warnings = self._heed(msgspec.structs.replace(chat, model=self.info.model))
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
                    yield Begun(prompt_ids, warnings=warnings)
                yield Piece(chunk.deltas, chunk.ids, chunk.logprobs, weight_spans=chunk.weight_spans)
                if chunk.finish_reason is not None:
                    yield Ended(
                        message=chunk.message or Message("assistant"),
                        finish_reason=chunk.finish_reason,
                        stop_sequence=chunk.stop_sequence,
                        usage=chunk.usage,
                        cached_tokens=chunk.usage.cached_tokens if chunk.usage else 0,
                        prompt_ids=prompt_ids if prompt_ids is not None else NO_IDS,
                        doubt=chunk.doubt,
                        warnings=self._unknown(chunk, prompt_ids),
                    )
        finally:
            await close_now(reply)

    def _heed(self, chat: Chat) -> tuple[Chat, tuple[str, ...]]:
        """The call with what the engine takes, and a line for what it does not."""
        if not chat.template_args or self.info.template_args:
            return chat, ()
        names = ", ".join(sorted(chat.template_args))
        why = f"{self.info.url or self.info.kind} refuses fields that OpenAI's API does not have"
        return msgspec.structs.replace(chat, template_args={}), (f"template arguments ({names}) were dropped: {why}",)

    def _unknown(self, last: ChatChunk, prompt_ids: Ids | None) -> tuple[str, ...]:
        """A line where nothing counts the ids of a reply that has some."""
        if prompt_ids is None or last.usage is not None or last.doubt is not None or last.finish_reason == "abort":
            return ()
        where = self.info.url or self.info.kind
        return (f"{where} sends no usage: its token ids are taken as they came, and one that is lost would not show",)

    async def count(self, chat: Chat) -> int:
        if isinstance(self.engine, CountingEngine):
            try:
                return await self.engine.count(msgspec.structs.replace(chat, model=self.info.model))
            except EngineError as error:
                if error.status != 404:
                    raise
        raise CallError("not_found", "This engine is used in chat mode and can't count tokens beforehand")


def _text_size(chat: Chat) -> int:
    """Characters of the prompt, roughly: tools, calls and the markup of each message are a part of it, too."""
    size = len(msgspec.json.encode(chat.tools)) + 32 * len(chat.messages)
    for message in chat.messages:
        content = message.content if isinstance(message.content, tuple) else (Text(message.content),)
        size += sum(len(part.text) for part in content if isinstance(part, Text))
        size += sum(len(call.arguments) for call in message.tool_calls)
    return size


def fit(chat: Chat, prompt_tokens: int, info: EngineInfo) -> Chat:
    """Clamp ``max_tokens`` to what the context still holds, where the engine says how long that is.

    Raises:
        CallError: it holds no more.
    """
    if not info.context_length:
        return chat
    room = info.context_length - prompt_tokens
    if room < 1:
        raise CallError(
            "context_length",
            f"The prompt has {prompt_tokens} tokens; the model takes {info.context_length}.",
            prompt_tokens=prompt_tokens,
            max_tokens=info.context_length,
        )
    wanted = chat.sampling.max_tokens
    limit = room if wanted is None else max(1, min(wanted, room))
    return msgspec.structs.replace(chat, sampling=msgspec.structs.replace(chat.sampling, max_tokens=limit))
