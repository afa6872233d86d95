"""Events as they happen: none lost and none twice, over however many connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar.rollout import watch_api
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import task


async def listen(world: World, last: int | None = None) -> AsyncIterator[dict[str, Any]]:
    """The events of one connection. The first is ``{}``: it stands."""
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    async with world.admin.stream("GET", "/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        event: dict[str, Any] = {}
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if line.startswith(":"):
                yield {"comment": value}
            elif name == "id":
                event["id"] = int(value)
            elif name == "data":
                event |= {"data": json.loads(value)}
            elif not line and event:
                yield event
                event = {}


async def take(events: AsyncIterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            event = await anext(events)
            if "id" in event:
                found.append(event)
    return found


async def test_events_come_as_they_happen(world: World) -> None:
    await world.join()
    events = listen(world)
    await anext(events)  # connected
    await world.submit(task())
    found = await take(events, 1)
    while found[-1]["data"]["subject"] != "t1":
        found += await take(events, 1)
    assert found[-1]["data"]["state"] == "running"
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_listener_goes_on_where_it_was_cut_off(world: World) -> None:
    await world.join()
    await world.run(task(num_samples=2))
    everything = listen(world, 0)
    ids = [event.id for event in await world.ledger.events_after(0)]
    assert [each["id"] for each in await take(everything, len(ids))] == ids
    await everything.aclose()  # type: ignore[attr-defined]
    resumed = listen(world, ids[2])
    assert [each["id"] for each in await take(resumed, len(ids) - 3)] == ids[3:]
    await world.submit(task("t2"))
    assert (await take(resumed, 1))[0]["id"] > ids[-1]
    await resumed.aclose()  # type: ignore[attr-defined]


async def test_a_silent_stream_shows_that_it_lives(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_api, "SSE_HEARTBEAT", 0.05)
    world = await make_world()
    events = listen(world)
    async with asyncio.timeout(10):
        comments = [await anext(events) for _ in range(3)]
    assert all("comment" in each for each in comments)
    await events.aclose()  # type: ignore[attr-defined]


async def test_an_id_that_is_none_is_refused(world: World) -> None:
    for last in ("x", "-1", "1e9", "9" * 30):
        answer = await world.admin.get("/events", headers={"Last-Event-ID": last})
        assert answer.status_code == 422, last


async def test_status_and_metrics_show_the_fleet(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    await world.admin.delete("/nodes/n2")
    await world.submit(task(num_samples=3))
    (lease,) = await world.claim(room=1)
    await world.finish(lease)
    status = await world.get("/rollout/status")
    assert status["tasks"] == {"t1": "running"}
    assert status["nodes"]["total"] == 2
    assert status["nodes"]["draining"] == 1
    assert status["pipeline"]["sessions"]["COMPLETED"] == 1
    text = ""
    async with asyncio.timeout(10):  # what the ledger tells is counted a moment later
        while "polar_sessions_ended_total{" not in text:
            text = (await world.as_("read").get("/metrics")).text
    assert 'polar_sessions{state="REGISTERED"} 2.0' in text
    assert 'polar_sessions_ended_total{status="COMPLETED"} 1.0' in text
    assert "polar_tokens_trained_total 8.0" in text
    assert 'polar_splits_total{reason="retokenized"} 1.0' in text
    assert 'polar_stage_seconds_sum{stage="run"} 2.0' in text
    assert 'polar_nodes{condition="draining"} 1.0' in text
    assert 'polar_ledger_write_seconds_count{write="deliver"} 2.0' in text


async def test_health_needs_no_credential(world: World) -> None:
    answer = await world.as_("nobody").get("/health")
    assert answer.json() == {"status": "ok", "nodes": 0}
