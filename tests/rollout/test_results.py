"""Results for trainers that pull: in order, from a cursor on, again until they are acknowledged."""

from __future__ import annotations

import asyncio

import pytest

from polar.store.base import SessionRecord
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import task


async def test_results_come_in_order_and_again_until_acknowledged(world: World) -> None:
    await world.join()
    await world.run(task(num_samples=3))
    first = await world.get("/results", limit=2, consumer="trainer")
    assert [each["result"]["session_id"] for each in first["results"]] == ["t1-0", "t1-1"]
    assert first["results"][0]["result"]["trajectory"]["traces"][0]["loss_mask"][0] == 1
    assert first["cursor"] == first["results"][-1]["cursor"]
    assert await world.get("/results", limit=2, consumer="trainer") == first
    ack = await world.as_("submit").post("/results/ack", json={"consumer": "trainer", "cursor": first["cursor"]})
    assert ack.json() == {"consumer": "trainer", "cursor": first["cursor"]}
    rest = await world.get("/results", consumer="trainer")
    assert [each["result"]["session_id"] for each in rest["results"]] == ["t1-2"]
    assert rest["acknowledged"] == first["cursor"]


async def test_consumers_do_not_disturb_each_other_and_a_cursor_goes_back(world: World) -> None:
    await world.join()
    await world.run(task(num_samples=2))
    page = await world.get("/results", consumer="a")
    await world.admin.post("/results/ack", json={"consumer": "a", "cursor": page["cursor"]})
    assert (await world.get("/results", consumer="a"))["results"] == []
    assert len((await world.get("/results", consumer="b"))["results"]) == 2
    assert len((await world.get("/results", consumer="a", cursor=0))["results"]) == 2


async def test_an_acknowledgement_never_goes_back(world: World) -> None:
    await world.join()
    await world.run(task(num_samples=2))
    page = await world.get("/results")
    for cursor in (page["cursor"], page["results"][0]["cursor"]):
        ack = await world.admin.post("/results/ack", json={"consumer": "default", "cursor": cursor})
    assert ack.json()["cursor"] == page["cursor"]


async def test_what_is_not_there_can_not_be_acknowledged(world: World) -> None:
    await world.join()
    await world.run(task())
    page = await world.get("/results")
    ack = await world.admin.post("/results/ack", json={"consumer": "x", "cursor": page["cursor"] + 1})
    assert (ack.status_code, "retention" in ack.json()["detail"]) == (422, True)
    assert len((await world.get("/results", consumer="x"))["results"]) == 1


async def test_waiting_for_a_result_answers_when_it_comes(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    waiting = asyncio.create_task(world.get("/results", wait=30))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await world.finish(lease)
    async with asyncio.timeout(10):
        page = await waiting
    assert [each["result"]["session_id"] for each in page["results"]] == ["t1-0"]


async def test_a_second_server_over_the_same_ledger_sees_what_the_first_took_in(make_world: MakeWorld) -> None:
    one = await make_world()
    two = await make_world(ledger=one.ledger)
    await one.join()
    waiting = asyncio.create_task(two.get("/results", wait=30))
    await one.run(task())
    async with asyncio.timeout(20):
        assert len((await waiting)["results"]) == 1


async def test_a_server_counts_what_comes_after_its_start_and_each_session_once(make_world: MakeWorld) -> None:
    one = await make_world()
    await one.join()
    await one.run(task("before"))
    two = await make_world(ledger=one.ledger)
    await one.submit(task("cut", num_samples=2))
    await one.admin.delete("/rollout/task/cut")
    text = ""
    async with asyncio.timeout(20):
        while 'polar_sessions_ended_total{status="ERROR"} 2.0' not in text:
            text = (await two.admin.get("/metrics")).text
    assert 'polar_sessions_ended_total{status="COMPLETED"}' not in text


async def test_a_page_whose_first_session_is_forgotten_in_the_meantime_is_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.join()
    await world.run(task(num_samples=3))
    find = world.ledger.session

    async def session(session_id: str) -> SessionRecord | None:
        return None if session_id == "t1-0" else await find(session_id)

    monkeypatch.setattr(world.ledger, "session", session)
    page = await world.get("/results")
    assert [each["result"]["session_id"] for each in page["results"]] == ["t1-1", "t1-2"]
