from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from polar.contract.chat import Chat, Message
from polar.engines.base import ChatChunk
from polar.engines.openai import OpenAIEngine
from tests.support.tinymodel import make_tiny_model

Start = Callable[..., Any]
HELLO = Chat(model="any", messages=(Message("user", "Hello"),))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines, and closes them after the test."""
    engines: list[OpenAIEngine] = []

    async def start_one(url: str, **options: Any) -> OpenAIEngine:
        engine = OpenAIEngine(url, **options)
        engines.append(engine)
        await engine.start()
        return engine

    yield start_one
    for engine in engines:
        await engine.close()


async def call(engine: OpenAIEngine, chat: Chat = HELLO, *, stream: bool = True) -> list[ChatChunk]:
    """All chunks of one call."""
    return [c async for c in engine.chat(chat, request_id="req-1", affinity="session-1", stream=stream)]


def ids(chunks: list[ChatChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def logprobs(chunks: list[ChatChunk]) -> list[float]:
    return [value for chunk in chunks for value in chunk.logprobs]


def prompt(chunks: list[ChatChunk]) -> list[int]:
    (found,) = [chunk.prompt_ids for chunk in chunks if chunk.prompt_ids is not None]
    return [int(token) for token in found]
