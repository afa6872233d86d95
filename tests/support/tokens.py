"""Why: tests of ids in, ids out need no HTTP. The same script, model and log as the scripted server's, behind
the ``TokenEngine`` protocol in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from polar.contract.arrays import Ids
from polar.contract.chat import FinishReason, Sampling
from polar.engines.base import EngineError, EngineInfo, ErrorKind, TokenChunk
from tests.support.model import ScriptedModel


class ScriptedTokenEngine:
    """A token engine over a ``ScriptedModel``. A step's ``status`` becomes an ``EngineError`` of its kind."""

    structured = False
    """Whether it says that it can hold a reply to a schema. What it is asked stands in the log."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            kind="scripted",
            model="scripted",
            context_length=self.model.max_model_len,
            model_path=str(self.model.model_dir),
            structured=self.structured,
        )

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        affinity: str,
        response_format: dict[str, Any] | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[TokenChunk, None]:
        """See ``TokenEngine``. The reply ends at the first of ``stop_ids``, which it includes."""
        context = [int(token) for token in prompt_ids]
        if len(context) >= self.model.max_model_len:
            raise EngineError("context_length", "the prompt is too long", prompt_tokens=len(context))
        step = self.model.script.step(self.model.conversation(context, None))
        await asyncio.sleep(step.delay)
        if step.status is not None:
            raise EngineError(_kind(step.status), step.error, status=step.status)
        plan = self.model.plan(step, context, max_tokens=sampling.max_tokens)
        stops = [place for place, token in enumerate(plan.ids) if token in stop_ids]
        length = stops[0] + 1 if stops else len(plan.ids)
        generation = self.model.log.begin("direct", request_id, context)
        generation.request = {"response_format": response_format}
        try:
            for start in range(0, length, step.chunk_tokens):
                end = min(start + step.chunk_tokens, length)
                await asyncio.sleep(step.token_delay)
                if step.hold_after is not None and start <= step.hold_after < end:
                    await self.model.log.changed()
                    await self.model.hold(step.hold)
                if step.cut_after is not None and end > step.cut_after:
                    self.model.log.end(generation, "cut")
                    raise EngineError("unavailable", "the scripted engine was cut")
                version = self.model.weight_version
                generation.sampled_ids += plan.ids[start:end]
                generation.logprobs += plan.logprobs[start:end]
                generation.weight_versions += [version] * (end - start)
                finish: FinishReason | None = None
                if end == length:
                    finish = "stop" if stops else plan.finish_reason
                    generation.finish_reason = finish
                    self.model.log.end(generation, "done")
                yield TokenChunk(plan.ids[start:end], plan.logprobs[start:end], version, finish)
        finally:
            if generation.ended == "running":
                self.model.log.end(generation, "cancelled")
            await self.model.log.changed()


def _kind(status: int) -> ErrorKind:
    if status in (429, 503):
        return "overloaded"
    return "bad_request" if 400 <= status < 500 else "unavailable"
