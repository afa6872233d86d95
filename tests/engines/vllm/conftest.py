from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.engines.base import TokenChunk
from polar.engines.vllm import VLLMEngine
from polar.engines.vllm_wire import COMPLETIONS, GENERATE
from tests.support.model import ScriptedModel
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model

PROMPT = [1, 5, 7]
STOP = frozenset({2})
LIMITED = Sampling(max_tokens=64)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class Bench:
    """A started engine, and the scripted model behind it."""

    engine: VLLMEngine
    model: ScriptedModel
    url: str

    async def call(self, sampling: Sampling = LIMITED, prompt: list[int] = PROMPT) -> list[TokenChunk]:
        """All chunks of one call."""
        stream = self.engine.generate(ids(prompt), sampling, stop_ids=STOP, request_id="req-1", affinity="session-1")
        return [chunk async for chunk in stream]


MakeBench = Callable[..., Any]


@pytest.fixture(params=[GENERATE, COMPLETIONS])
def route(request: pytest.FixtureRequest) -> str:
    """Each of the two routes that take token ids."""
    return str(request.param)


@pytest.fixture
async def bench(model_dir: Path) -> AsyncIterator[MakeBench]:
    async with AsyncExitStack() as stack:

        async def make(steps: list[Step], route: str = GENERATE, **options: Any) -> Bench:
            off = () if route == GENERATE else (GENERATE,)
            running = await stack.enter_async_context(scripted_engine(model_dir, steps, off=off))
            engine = VLLMEngine(running.url, **options)
            await engine.start()
            stack.push_async_callback(engine.close)
            assert engine.capabilities.token_route == route
            return Bench(engine, running.model, running.url)

        yield make


def sampled(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def logprobs(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]
