"""Calls that come again at a bad moment: while the first is being given up or kept, or after it failed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from polar.contract.completion import Completion
from tests.gateway.conftest import World
from tests.gateway.test_leaving import BODY, HELD, Http, leave, sampling, unwatched, watched
from tests.support.script import Step


@dataclass
class SlowStore:
    """Makes the world's store keep a call only when told."""

    world: World
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        store: Any = self.world.node.store
        keep = store.put_completion

        async def put(completion: Completion) -> None:
            self.begun.set()
            await self.go.wait()
            await keep(completion)

        store.put_completion = put


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_of_a_call_that_is_being_given_up_is_sampled_afresh(make_world, stream) -> None:
    """Its predecessor ends with an error soon: to join it would be to fail with it, for good."""
    world: World = await make_world([HELD], grace=0.01)
    slow = SlowStore(world)
    async with Http(world) as http:
        first = http.begin({**BODY, "stream": stream})
        await sampling(world)
        await leave(first)
        await slow.begun.wait()
        again = http.begin()
        await sampling(world, 2)
        slow.go.set()
        world.model.release("hold")
        assert await again == "one two three four five"
    assert sorted(completion.outcome for completion in await world.recorded(2)) == ["abandoned", "ok"]


async def test_a_retry_gets_the_answer_that_is_being_kept_however_long_that_takes(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")], grace=0.01)
    slow = SlowStore(world)
    async with Http(world) as http:
        first = http.begin()
        await slow.begun.wait()
        await leave(first)
        await unwatched(world)
        (call,) = world.session.calls
        call.give_up()  # what the end of the grace does
        again = http.begin()
        await watched(world)
        slow.go.set()
        assert await again == "Fine."
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"


async def test_best_of_three_stays_three_when_the_engine_was_away(make_world) -> None:
    steps = (*[Step(status=503)] * 3, *[HELD] * 3)
    world: World = await make_world(lambda _: Step(attempts=steps))
    slow = SlowStore(world)
    async with Http(world) as http:
        refused = [asyncio.ensure_future(http.session.post(http.url, json=BODY)) for _ in range(3)]
        await watched(world, 3)
        slow.go.set()
        assert [(await response).status for response in refused] == [503] * 3
        tasks = [http.begin(x_stainless_retry_count="1") for _ in range(3)]
        await sampling(world, 3)
        world.model.release("hold")
        await asyncio.gather(*tasks)
    outcomes = [completion.outcome for completion in await world.recorded(6)]
    assert sorted(outcomes) == ["engine_error"] * 3 + ["ok"] * 3


async def test_a_stored_error_is_not_given_again(make_world) -> None:
    world: World = await make_world(lambda _: Step(attempts=(Step(status=500), Step(text="Fine."))))
    async with Http(world) as http:
        async with http.session.post(http.url, json=BODY, headers={"idempotency-key": "k"}) as response:
            assert response.status == 502
        assert await http.ask(idempotency_key="k") == "Fine."
        assert await http.ask(idempotency_key="k") == "Fine."
    assert [completion.outcome for completion in await world.recorded(2)] == ["engine_error", "ok"]


async def test_a_retry_that_asks_for_the_whole_reply_joins_the_stream(make_world) -> None:
    """Claude Code does so when a stream stood still."""
    world: World = await make_world([HELD])
    async with Http(world) as http:
        first = http.begin({**BODY, "stream": True})
        await sampling(world)
        await leave(first)
        await unwatched(world)
        again = http.begin()
        await watched(world)
        world.model.release("hold")
        assert await again == "one two three four five"
    await world.recorded(1)


async def test_one_key_for_many_at_a_time_is_one_call_and_an_empty_one_is_none(make_world) -> None:
    world: World = await make_world([HELD])
    async with Http(world) as http:
        tasks = [http.begin(idempotency_key="k") for _ in range(8)]
        await watched(world, 8)
        world.model.release("hold")
        assert set(await asyncio.gather(*tasks)) == {"one two three four five"}
        await world.recorded(1)
        await http.ask(idempotency_key="")
        await http.ask({**BODY, "temperature": 0.3}, idempotency_key="")
    await world.recorded(3)
