from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.engines.base import TokenChunk
from polar.engines.sglang import SGLangEngine
from tests.support.tinymodel import make_tiny_model

Start = Callable[..., Any]
EOS = 2
PROMPT = (10, 11, 12, 13)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines, and closes them after the test."""
    engines: list[SGLangEngine] = []

    async def start_one(url: str, **options: Any) -> SGLangEngine:
        engine = SGLangEngine(url, **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield start_one
    for engine in engines:
        await engine.close()


def generate(
    engine: SGLangEngine,
    sampling: Sampling | None = None,
    *,
    prompt: Sequence[int] = PROMPT,
    request_id: str = "req-1",
) -> Any:
    return engine.generate(
        ids(prompt),
        sampling or Sampling(max_tokens=100),
        stop_ids=frozenset({EOS}),
        request_id=request_id,
        affinity="session-1",
    )


async def call(engine: SGLangEngine, sampling: Sampling | None = None, **more: Any) -> list[TokenChunk]:
    """All chunks of one call."""
    return [chunk async for chunk in generate(engine, sampling, **more)]


def sampled(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def logprobs(chunks: list[TokenChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]
