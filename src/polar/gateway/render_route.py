"""Ids in, ids out with the engine's own rendering, where the model's tokenizer is not at hand here.

Without a tokenizer nothing can be proven about what a template would append, so every prompt is rendered whole:
a conversation stays one trace where its rendering begins with the ids that were sampled, and splits elsewhere.
A reply is parsed when it is whole; its client sees it then.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import numpy as np

from polar.contract.chat import Chat, Delta, FinishReason, Message, ReasoningDelta, TextDelta, ToolCallDelta
from polar.contract.completion import Mode
from polar.engines.base import EngineError, EngineInfo, RenderingEngine
from polar.gateway.backends import Begun, Context, Ended, Event, Piece, fit
from polar.gateway.constraints import heed
from polar.gateway.continuing import Continuing
from polar.rendering.offered import DROPPED, MOST, probes
from polar.rendering.plain import PlainText


class RenderRouteBackend:
    """A rendering engine, made ready for the pipeline."""

    mode: Mode = "tito"
    plain: PlainText | None = None

    def __init__(self, engine: RenderingEngine) -> None:
        self.engine = engine
        self._loses_tools: dict[bytes, bool] = {}

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    async def run(self, chat: Chat, context: Context, *, stream: bool) -> AsyncGenerator[Event, None]:
        prompt = await self.engine.render(chat)
        chat, warnings = heed(chat, self.info, tools_lost=await self._tools_lost(chat))
        chat = fit(chat, len(prompt), self.info)
        yield Begun(prompt, warnings=warnings, constrained=chat.response_format is not None)
        sampling = Continuing(
            self.engine,
            prompt,
            chat.sampling,
            stop_ids=frozenset(),
            call_id=context.call_id,
            affinity=context.affinity,
            admission=context.admission,
            response_format=chat.response_format,
            stream=False,  # the reply can only be parsed when it is whole
        )
        sampled: list[int] = []
        finish: FinishReason = "abort"
        stop: str | None = None
        doubt: str | None = None
        async with aclosing(sampling.chunks()) as chunks:
            async for chunk in chunks:
                sampled += chunk.ids
                finish, stop = chunk.finish_reason or finish, chunk.stop_sequence
                doubt = doubt or chunk.doubt
                yield Piece((), chunk.ids, chunk.logprobs, chunk.weight_version, chunk.weight_spans)
        # Without a stop string, what ended the reply is an id of its own, which is no text.
        text = sampled[:-1] if finish == "stop" and stop is None else sampled
        message = _cut(await self.engine.read(chat, prompt, text, finish), stop)
        if finish == "stop" and message.tool_calls:
            finish = "tool_calls"
        yield Piece(_deltas(message))
        yield Ended(
            message,
            finish,
            stop,
            usage=sampling.usage,
            cached_tokens=sampling.cached_tokens,
            limit=chat.sampling.max_tokens,
            stops=sampling.stops,
            doubt=doubt,
        )

    async def _tools_lost(self, chat: Chat) -> str | None:
        """As ``Renderer.tools_lost``, of the engine's own template; asked once for each set of tools."""
        if not chat.tools or chat.tool_choice == "none":
            return None
        digest = hashlib.sha256(msgspec.json.encode([chat.tools, chat.template_args])).digest()
        if digest not in self._loses_tools:
            try:
                offered, without = [await self.engine.render(probe) for probe in probes(chat)]
            except EngineError:
                return None  # it may be another time
            if len(self._loses_tools) >= MOST:
                self._loses_tools.clear()
            self._loses_tools[digest] = np.array_equal(offered, without)
        return DROPPED if self._loses_tools[digest] else None

    async def count(self, chat: Chat) -> int:
        return len(await self.engine.render(chat))


def _cut(message: Message, stop: str | None) -> Message:
    """The message as far as a stop string."""
    if stop is None or not isinstance(message.content, str):
        return message
    return msgspec.structs.replace(message, content=message.content.partition(stop)[0])


def _deltas(message: Message) -> list[Delta]:
    """What a client sees of a message that comes all at once."""
    deltas: list[Delta] = []
    if message.reasoning:
        deltas.append(ReasoningDelta(message.reasoning))
    if message.content and isinstance(message.content, str):
        deltas.append(TextDelta(message.content))
    calls = enumerate(message.tool_calls)
    return [*deltas, *(ToolCallDelta(place, call.arguments, id=call.id, name=call.name) for place, call in calls)]
