"""Token servers of a pool in this process: scripted, with a plug that can be pulled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from tests.support.model import ScriptedModel
from tests.support.script import Script, Step
from tests.support.tokens import ScriptedTokenEngine


class Server(ScriptedTokenEngine):
    """A scripted token engine at a made-up address. ``down``: nothing answers there; ``ill``: it answers, and says
    that it is not well; ``mute``: it takes calls and looks, and never answers a look."""

    def __init__(self, model_dir: Path, name: str, step: Step, **changes: Any) -> None:
        super().__init__(ScriptedModel(model_dir, Script(choose=lambda _: step)))
        self.url = f"http://{name}"
        self.down = False
        self.ill = False
        self.mute = False
        self.closed = False
        self.asked = 0
        self._changes = changes

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, url=self.url, **self._changes)

    async def close(self) -> None:
        self.closed = True

    async def check(self) -> None:
        if self.mute:
            await asyncio.Event().wait()
        if self.down or self.ill:
            raise EngineError("unavailable", f"{self.url}/health: no")

    async def generate(self, prompt_ids: Ids, sampling: Sampling, **options: Any) -> AsyncGenerator[TokenChunk, None]:
        self.asked += 1
        if self.down:
            raise EngineError("unavailable", f"{self.url}: the connection failed")
        async with aclosing(super().generate(prompt_ids, sampling, **options)) as reply:
            async for chunk in reply:
                yield chunk


def begin(pool: Any, affinity: str) -> AsyncGenerator[TokenChunk, None]:
    """A call of a session."""
    prompt = np.array([5, 6, 7], dtype=np.int32)
    generation: AsyncGenerator[TokenChunk, None] = pool.generate(
        prompt, Sampling(max_tokens=50), stop_ids=frozenset(), request_id="r", affinity=affinity
    )
    return generation


async def ask(pool: Any, affinity: str) -> list[TokenChunk]:
    """A call of a session, to its end."""
    return [chunk async for chunk in begin(pool, affinity)]
