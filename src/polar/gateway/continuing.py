"""Why: an update of the weights may stop every generation in the middle (a pause at the engine with mode "abort").
For the harness it must stay one reply. Ids in, ids out makes that exact: the ids so far become part of the next
prompt, and sampling goes on behind them, under the new weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import Ids, ids
from polar.contract.chat import FinishReason, Sampling, Usage
from polar.contract.completion import WeightSpan
from polar.engines.base import EngineError, TokenChunk, TokenEngine, close_now
from polar.gateway.inference import Admission

log = logging.getLogger("polar.gateway")

STALLED = 8
"""Generations in a row that were stopped before they sampled anything: then the reply is given up."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0
"""Seconds before a generation that sampled nothing is tried again, doubled each time: an engine that refuses calls
while it is paused gets the time that an update takes."""


class Continuing:
    """One reply of a token engine, however often the engine stops it.

    Args:
        sampling: with ``max_tokens``, the bound on the whole reply.
        admission: the call's place at the engine; a stopped call waits there until inference goes on.
        response_format: what the engine holds the reply to. Its grammar can't begin in the middle, so such a reply
            does not go on where it was stopped.
        stream: somebody looks at the reply before its end.
    """

    def __init__(
        self,
        engine: TokenEngine,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        call_id: str,
        affinity: str,
        admission: Admission,
        response_format: dict[str, Any] | None = None,
        stream: bool = True,
    ) -> None:
        self.stops = 0
        """How often the engine stopped the reply and it went on."""
        self.cached_tokens = 0
        self.usage: Usage | None = None
        """The engine's own count of the whole reply, if it counted every part."""
        self._engine = engine
        self._prompt = prompt_ids
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._call_id = call_id
        self._affinity = affinity
        self._admission = admission
        self._response_format = response_format
        self._stream = stream
        self._ids: list[int] = []

    async def chunks(self) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of the whole reply: weight spans count from its first token, and only the last chunk has a
        finish reason. That is ``abort`` where the engine stopped it again and again without sampling anything.

        Raises:
            EngineError: the engine failed.
        """
        stalled = 0
        while True:
            start, finish = len(self._ids), None
            generation = self._generate()
            try:
                async for chunk in generation:
                    self._ids += chunk.ids
                    finish = chunk.finish_reason
                    self._count(chunk, first=start == 0)
                    yield self._placed(chunk, start)
                    if finish is not None:
                        break
            finally:
                await close_now(generation)
            if finish is None:
                raise EngineError("unavailable", "the engine ended the reply without a finish reason")
            if finish != "abort":
                return
            stalled = 0 if len(self._ids) > start else stalled + 1
            end = self._end(stalled)
            if end is not None:
                yield TokenChunk((), (), finish_reason=end)
                return
            self.stops += 1
            line = "call %s: the engine stopped it after %d tokens: going on"
            log.info(line, self._call_id, len(self._ids), extra={"call_id": self._call_id})
            self._admission.leave()
            if stalled:
                await asyncio.sleep(min(FIRST_WAIT * 2 ** (stalled - 1), LONGEST_WAIT))
            await self._admission.enter()

    def _generate(self) -> AsyncIterator[TokenChunk]:
        prompt, sampling = self._prompt, self._sampling
        request_id = f"{self._call_id}-{self.stops}" if self.stops else self._call_id
        if self._ids:
            prompt = np.concatenate([prompt, ids(self._ids)])
            if sampling.max_tokens is not None:
                sampling = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens - len(self._ids))
        return self._engine.generate(
            prompt,
            sampling,
            stop_ids=self._stop_ids,
            request_id=request_id,
            affinity=self._affinity,
            response_format=self._response_format,
            stream=self._stream,
        )

    def _placed(self, chunk: TokenChunk, start: int) -> TokenChunk:
        """The chunk as part of the whole reply, of which this generation began at ``start``."""
        spans = [WeightSpan(span.version, start + span.start, start + span.end) for span in chunk.weight_spans]
        finish = None if chunk.finish_reason == "abort" else chunk.finish_reason
        return TokenChunk(
            chunk.ids,
            chunk.logprobs,
            chunk.weight_version,
            finish,
            weight_spans=spans,
            stop_sequence=chunk.stop_sequence,
            doubt=chunk.doubt,
        )

    def _count(self, chunk: TokenChunk, *, first: bool) -> None:
        """What the engine had cached of the call's own prompt, and at the end of a generation what it counted."""
        if first:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if chunk.finish_reason is None:
            return
        before, now = self.usage, chunk.usage
        if first:
            self.usage = now
        elif before is not None and now is not None:
            self.usage = Usage(before.prompt_tokens, before.completion_tokens + now.completion_tokens)
        else:
            self.usage = None

    def _end(self, stalled: int) -> FinishReason | None:
        """Why a stopped reply does not go on, if it does not."""
        if self._ids and self._ids[-1] in self._stop_ids:
            return "stop"
        limit = self._sampling.max_tokens
        if limit is not None and len(self._ids) >= limit:
            return "length"
        halved = self._response_format is not None and bool(self._ids)
        return "abort" if halved or stalled >= STALLED else None
