"""Loops that go on, whatever fails in them."""

from __future__ import annotations

import asyncio

import pytest

from polar import background
from polar.contract.errors import PolarError
from polar.rollout.feed import Feed
from tests.rollout.conftest import World
from tests.rollout.making import task


async def test_a_step_that_fails_is_taken_again_and_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "AFTER_FAILURE", 0.0)
    errors: list[Exception] = [PolarError("the database is away"), KeyError("a bug")]
    done = asyncio.Event()

    async def step() -> None:
        if errors:
            raise errors.pop(0)
        done.set()

    going = asyncio.create_task(background.forever(step, "work"))
    async with asyncio.timeout(20):
        await done.wait()
    going.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going
    assert [(record.message, record.exc_info is not None) for record in caplog.records] == [
        ("work: the database is away", False),
        ("work", True),
    ]


async def test_a_feed_goes_on_after_an_error_and_closes_without_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "AFTER_FAILURE", 0.0)
    await world.join()
    feed = Feed(world.ledger)
    await feed.start()
    assert feed.last == await world.ledger.newest_event() > 0
    find, failed = world.ledger.events_after, asyncio.Event()

    async def events_after(event_id: int, limit: int = 1000) -> list[object]:
        if failed.is_set():
            return await find(event_id, limit)  # type: ignore[return-value]
        failed.set()
        raise KeyError("a bug")

    monkeypatch.setattr(world.ledger, "events_after", events_after)
    work = feed.work.next()
    await world.submit(task())
    feed.poke()
    async with asyncio.timeout(20):
        await work
    await feed.close()
    assert failed.is_set()
    assert feed.closed
