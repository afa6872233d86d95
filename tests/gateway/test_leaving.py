"""Clients that go away, come back, or ask twice: one generation a call, and none that nobody waits for."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.gateway.conftest import World
from tests.support.script import Step

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HELD = Step(text="one two three four five", hold_after=2)


class Http:
    """Raw requests, so that a test can leave in the middle of one."""

    def __init__(self, world: World) -> None:
        self.url = f"{world.node.server.url}/v1/chat/completions"
        self.session = aiohttp.ClientSession(headers={"authorization": f"Bearer {world.session.key}"})

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.session.close()

    async def ask(self, body: dict | None = None, **headers: str) -> str:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.url, json=body or BODY, headers=headers) as response:
            data = await response.json()
            assert response.status == 200, data
            return data["choices"][0]["message"]["content"]

    def begin(self, body: dict | None = None, **headers: str) -> asyncio.Task[str]:
        return asyncio.create_task(self.ask(body, **headers))


async def leave(task: asyncio.Task[str]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def unwatched(world: World) -> None:
    """Until the gateway has noticed that nobody waits for any call."""
    async with asyncio.timeout(10):
        while any(call.waiting for call in world.session.calls):
            await asyncio.sleep(0.005)


async def watched(world: World, clients: int = 1) -> None:
    """Until so many clients wait for the session's calls."""
    async with asyncio.timeout(10):
        while sum(call.waiting for call in world.session.calls) < clients:
            await asyncio.sleep(0.005)


async def sampling(world: World, count: int = 1) -> None:
    """Until the engine is in the middle of ``count`` generations."""
    await world.model.log.wait_for(lambda log: len([g for g in log if len(g.sampled_ids) >= 2]) >= count)


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_the_engine_and_its_reply_is_not_trained(
    make_world, stream, mode
) -> None:
    """C6: the generation ends, what was sampled is kept as abandoned (in a reply that comes whole, nothing)."""
    world: World = await make_world([HELD], grace=0.05, mode=mode)
    async with Http(world) as http:
        task = http.begin({**BODY, "stream": stream})
        await sampling(world)
        await leave(task)
        await world.model.log.wait_for(lambda log: log[0].ended == "cancelled")
    [completion] = await world.recorded(1)
    assert completion.outcome == "abandoned"
    kept = world.model.log.generations[0].sampled_ids if stream or mode == "tito" else []
    assert completion.response_ids.tolist() == kept


async def test_a_marked_retry_joins_the_call_in_flight(make_world) -> None:
    """C1: the SDK timed out and sends the same bytes again, while the first is still sampling."""
    world: World = await make_world([HELD])
    async with Http(world) as http:
        first = http.begin()
        await sampling(world)
        retry = http.begin(x_stainless_retry_count="1")
        await watched(world, 2)
        await leave(first)
        world.model.release("hold")
        assert await retry == "one two three four five"
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"
    assert len(world.model.log.generations) == 1


async def test_an_unmarked_repetition_joins_when_its_predecessor_went_away(make_world) -> None:
    world: World = await make_world([HELD])
    async with Http(world) as http:
        first = http.begin()
        await sampling(world)
        await leave(first)
        await unwatched(world)
        again = http.begin()
        await watched(world)
        world.model.release("hold")
        assert await again == "one two three four five"
    await world.recorded(1)


async def test_a_retried_stream_begins_at_its_first_delta(make_world) -> None:
    """C4: the same guarantees for streams."""
    world: World = await make_world([HELD])
    async with Http(world) as http:
        first = http.begin({**BODY, "stream": True})
        await sampling(world)
        await leave(first)
        await unwatched(world)
        async with http.session.post(http.url, json={**BODY, "stream": True}) as response:
            world.model.release("hold")
            lines = [line.decode().strip() async for line in response.content]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    assert text == "one two three four five"
    assert lines[-2] == "data: [DONE]"
    await world.recorded(1)


async def test_two_identical_calls_whose_clients_are_both_there_are_two(make_world) -> None:
    """C2: best-of-n harnesses send them on purpose."""
    world: World = await make_world([HELD])
    async with Http(world) as http:
        tasks = [http.begin(), http.begin()]
        await sampling(world, 2)
        world.model.release("hold")
        assert await asyncio.gather(*tasks) == ["one two three four five"] * 2
    one, two = await world.recorded(2)
    assert {one.outcome, two.outcome} == {"ok"}
    assert len(world.model.log.generations) == 2


async def test_a_repetition_after_the_answer_was_delivered_is_a_new_call(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    async with Http(world) as http:
        await http.ask()
        await http.ask()
    await world.recorded(2)


async def test_an_idempotency_key_is_one_call_however_late(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    async with Http(world) as http:
        assert await http.ask(idempotency_key="k") == await http.ask(idempotency_key="k")
        changed = {**BODY, "temperature": 0.3}
        async with http.session.post(http.url, json=changed, headers={"idempotency-key": "k"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["code"] == "idempotency_key_reused"
    await world.recorded(1)


async def test_closing_a_session_ends_its_calls_and_records_them(make_world) -> None:
    world: World = await make_world([HELD])
    async with Http(world) as http:
        task = http.begin()
        await sampling(world)
        await world.node.gateway.close(world.session)
        with pytest.raises(AssertionError, match="given up"):
            await task
    [completion] = await world.recorded(1)
    assert completion.outcome == "abandoned"


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_paused_gateway_holds_calls_and_keeps_their_streams_alive(make_world, monkeypatch, mode) -> None:
    """C11: during a weight sync a harness waits; it gets no error."""
    monkeypatch.setattr("polar.gateway.app.FIRST_BYTE", 0.01)
    monkeypatch.setattr("polar.gateway.app.KEEPALIVE", 0.01)
    world: World = await make_world([Step(text="Fine.")], mode=mode)
    await world.node.gateway.inference.pause(1.0)
    async with Http(world) as http, http.session.post(http.url, json={**BODY, "stream": True}) as response:
        assert response.status == 200
        assert (await response.content.readline()).startswith(b": keepalive")
        assert not world.model.log.generations
        world.node.gateway.inference.resume()
        rest = (await response.content.read()).decode()
    assert rest.endswith("data: [DONE]\n\n")
    await world.recorded(1)


@pytest.mark.parametrize("marked", ["0", "1"])
async def test_a_retry_of_one_of_two_identical_calls_joins_the_one_that_was_left(make_world, marked) -> None:
    world: World = await make_world([HELD])
    async with Http(world) as http:
        left, stays = http.begin(), http.begin()
        await sampling(world, 2)
        await leave(left)
        async with asyncio.timeout(10):
            while sum(call.waiting for call in world.session.calls) > 1:
                await asyncio.sleep(0.005)
        again = http.begin(x_stainless_retry_count=marked)
        await watched(world, 2)
        world.model.release("hold")
        assert await asyncio.gather(again, stays) == ["one two three four five"] * 2
    one, two = await world.recorded(2)
    assert {one.outcome, two.outcome} == {"ok"}
