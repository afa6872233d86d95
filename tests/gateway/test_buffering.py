"""Whole replies for streamed requests: sampled without a stream, sent as one, with signs of life meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from polar.gateway import app
from tests.gateway.conftest import World
from tests.support.script import Step

HELD = Step(text="one two three four five", hold_after=2)
STREAMS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, b"data: [DONE]\n\n"),
    "plain": ("/v1/completions", {"prompt": "hi"}, b"data: [DONE]\n\n"),
    "responses": ("/v1/responses", {"input": "hi"}, b"response.completed"),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        b"message_stop",
    ),
    "gemini": (
        "/v1beta/models/m:streamGenerateContent?alt=sse",
        {"contents": [{"parts": [{"text": "hi"}]}]},
        b'"finishReason":"STOP"',
    ),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams show life at once."""
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    monkeypatch.setattr(app, "KEEPALIVE", 0.01)


@pytest.mark.parametrize("api", STREAMS)
async def test_a_stream_comes_in_one_go_when_the_reply_is_whole_and_committed(make_world, api) -> None:
    world: World = await make_world([HELD], buffer_replies=True)
    path, body, end = STREAMS[api]
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = world.node.server.url + path
        async with http.post(url, json={"model": "m", "stream": True, **body}) as response:
            assert response.status == 200
            await world.model.log.wait_for(lambda log: any(len(g.sampled_ids) >= 2 for g in log))
            assert not await world.completions()
            world.model.release("hold")
            rest = await response.content.read()
    assert end in rest
    assert b"one" in rest
    assert b": keepalive" not in rest[rest.index(b"data: ") :]
    await world.recorded(1)


async def test_signs_of_life_come_while_the_reply_is_sampled(make_world) -> None:
    world: World = await make_world([HELD], buffer_replies=True)
    path, body, _ = STREAMS["chat"]
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = world.node.server.url + path
        async with http.post(url, json={"model": "m", "stream": True, **body}) as response:
            for _ in range(3):
                assert (await response.content.readline()).startswith(b": keepalive")
                assert await response.content.readline() == b"\n"
            world.model.release("hold")
            await response.content.read()


async def test_the_engine_is_not_asked_for_a_stream(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")], mode="chat", buffer_replies=True)
    stream = await world.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
    assert text == "Fine."
    assert world.model.log.generations[0].request["stream"] is False


async def test_an_engine_that_breaks_before_the_end_is_a_status_and_no_broken_stream(make_world, monkeypatch) -> None:
    monkeypatch.setattr(app, "FIRST_BYTE", 60.0)
    world: World = await make_world([Step(text="one two three four", cut_after=2)], buffer_replies=True)
    path, body, _ = STREAMS["chat"]
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(world.node.server.url + path, json={"model": "m", "stream": True, **body}) as response:
            assert response.status == 502
    [completion] = await world.recorded(1)
    assert completion.outcome == "engine_error"


async def test_a_client_that_leaves_a_buffered_stream_frees_the_engine(make_world) -> None:
    world: World = await make_world([HELD], grace=0.05, buffer_replies=True)

    async def ask() -> None:
        async for _ in await world.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        ):
            pass

    task = asyncio.create_task(ask())
    await world.model.log.wait_for(lambda log: any(len(g.sampled_ids) >= 2 for g in log))
    task.cancel()
    await world.model.log.wait_for(lambda log: log[0].ended == "cancelled")
    [completion] = await world.recorded(1)
    assert completion.outcome == "abandoned"
