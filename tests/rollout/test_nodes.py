"""Gateway nodes at work: they claim, renew, hand over and hand back; an old lease is worth nothing."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from polar.contract.arrays import to_json
from polar.contract.rollout import Claim, Delivery
from polar.rollout import dispatch
from polar.store import leases, nodes
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS, completion, result, task


async def test_a_claim_waits_for_work_and_gets_it_when_it_comes(world: World) -> None:
    await world.join()
    waiting = asyncio.create_task(world.claim(wait=30))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await world.submit(task())
    async with asyncio.timeout(10):
        (lease,) = await waiting
    assert (lease["session_id"], lease["attempt"], lease["seconds"]) == ("t1-0", 1, dispatch.LEASE_SECONDS)
    assert lease["task"]["instruction"] == "do it"


async def test_a_claim_without_work_ends_when_its_time_is_up(world: World) -> None:
    await world.join()
    async with asyncio.timeout(10):
        assert await world.claim(wait=0.1) == []


async def test_work_is_given_once(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    waiting = [asyncio.create_task(world.claim(node, room=2, wait=1)) for node in ("n1", "n2")]
    await asyncio.sleep(0)
    await world.submit(task(num_samples=3))
    leases = [lease["session_id"] for each in waiting for lease in await each]
    leases += [lease["session_id"] for lease in await world.claim()]
    assert sorted(leases) == ["t1-0", "t1-1", "t1-2"]


async def test_higher_priority_goes_first(world: World) -> None:
    await world.join()
    await world.submit(task("low"))
    await world.submit(task("high", dispatch_priority=50))
    assert [lease["task_id"] for lease in await world.claim(room=2)] == ["high", "low"]


async def test_a_node_that_has_gone_away_is_given_nothing(world: World) -> None:
    await world.join()
    body = to_json(Claim(room=1, wait=30))
    _, writer = await asyncio.open_connection("127.0.0.1", int(world.url.rpartition(":")[2]))
    head = f"POST /nodes/n1/claim HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKENS['node']}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    async with asyncio.timeout(10):  # until it waits for work
        while world.server.feed.work._next is None:
            await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.1)
    await world.submit(task())
    assert [lease["session_id"] for lease in await world.claim(wait=5)] == ["t1-0"]


async def test_a_claim_whose_answer_was_lost_has_the_same_leases_again(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    first = await world.claim(room=1, claim_id="c1")
    again = await world.claim(room=1, claim_id="c1")
    assert [lease["session_id"] for lease in first] == [lease["session_id"] for lease in again] == ["t1-0"]


async def test_a_heartbeat_says_what_is_held_no_more(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    held = [
        {"session_id": lease["session_id"], "attempt": 1, "state": "RUNNING"},
        {"session_id": "gone-0", "attempt": 1, "state": "RUNNING"},
    ]
    reply = await world.node("/nodes/n1/heartbeat", {"held": held, "load": {"run_inflight": 1}})
    assert reply["lost"] == ["gone-0"]
    assert (await world.get("/sessions/t1-0"))["status"] == "RUNNING"
    node = await world.get("/nodes/n1")
    assert (node["sessions"], node["metrics"]["run_inflight"], node["healthy"]) == (1, 1, True)


async def test_a_node_that_says_it_drains_is_given_nothing_until_it_comes_again(world: World) -> None:
    await world.join()
    await world.submit(task())
    for _ in range(2):
        await world.node("/nodes/n1/heartbeat", {"draining": True})
    assert (await world.get("/nodes/n1"))["draining"] is True
    assert (await world.node("/nodes/n1/heartbeat", {}))["drain"] is True
    assert await world.claim() == []
    told = [event.state for event in await world.ledger.events_after(0) if event.kind == "node"]
    assert told == ["up", "draining"]
    await world.join(instance="b")
    assert (await world.get("/nodes/n1"))["draining"] is False
    assert len(await world.claim()) == 1


async def test_a_node_that_is_not_known_must_register(world: World) -> None:
    answer = await world.as_("node").post("/nodes/stranger/heartbeat", json={})
    assert answer.status_code == 404


async def test_a_lapsed_lease_makes_a_new_attempt_and_the_old_one_is_refused(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LEASE_SECONDS", 0.2)
    world = await make_world()
    await world.join("n1")
    await world.join("n2")
    await world.submit(task())
    await world.claim("n1")
    monkeypatch.setattr(dispatch, "LEASE_SECONDS", 60.0)
    async with asyncio.timeout(20):
        (new,) = await world.claim("n2", wait=15)  # the server takes it back by itself, and wakes who waits
    assert (new["session_id"], new["attempt"]) == ("t1-0", 2)
    late = Delivery(session_id="t1-0", attempt=1, result=result(attempt=1))
    answer = await world.as_("node").post("/nodes/n1/deliveries", content=to_json(late))
    assert answer.status_code == 409
    await world.finish(new, node_id="n2")
    (told,) = (await world.get("/rollout/task/t1"))["results"]
    assert (told["attempt"], told["node_id"]) == (2, "n2")


async def test_a_result_that_is_delivered_twice_counts_once(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    await world.finish(lease)
    await world.finish(lease)
    status = await world.get("/rollout/task/t1")
    assert len(status["results"]) == 1
    async with asyncio.timeout(10):
        while "polar_tokens_trained_total 0.0" in (text := (await world.admin.get("/metrics")).text):
            await asyncio.sleep(0.02)
    assert "polar_tokens_trained_total 8.0" in text


async def test_nobody_delivers_for_what_it_does_not_hold(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    await world.submit(task())
    await world.claim("n1")
    forged = Delivery(session_id="t1-0", attempt=1, result=result(reward=100.0))
    for node, status in (("n2", 409), ("n3", 409)):
        answer = await world.as_("node").post(f"/nodes/{node}/deliveries", content=to_json(forged))
        assert answer.status_code == status, answer.text
    assert await world.ledger.results() == []


async def test_a_result_bears_the_name_of_the_node_that_brought_it(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    await world.finish(lease, node_id="n1")
    (told,) = (await world.get("/rollout/task/t1", results="summary"))["results"]
    assert told["node_id"] == "n1"


async def test_a_delivery_of_two_sessions_at_once_is_refused(world: World) -> None:
    await world.join()
    await world.submit(task(num_samples=2))
    await world.claim()
    mixed = Delivery(session_id="t1-0", attempt=1, completions=[completion("t1-0"), completion("t1-1")])
    answer = await world.as_("node").post("/nodes/n1/deliveries", content=to_json(mixed))
    assert answer.status_code == 422
    assert await world.ledger.completions("t1-0") == []


async def test_a_session_handed_back_is_given_to_another_at_once(world: World) -> None:
    await world.join("n1")
    await world.join("n2")
    await world.submit(task())
    (lease,) = await world.claim("n1")
    waiting = asyncio.create_task(world.claim("n2", wait=30))
    await asyncio.sleep(0)
    await world.node("/nodes/n1/release", {"session_id": lease["session_id"], "attempt": lease["attempt"]})
    async with asyncio.timeout(10):
        (again,) = await waiting
    assert again["attempt"] > lease["attempt"]


async def test_a_session_handed_back_too_often_ends_and_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MAX_HANDED_BACK", 2)
    await world.join()
    await world.submit(task())
    for _ in range(2):
        (lease,) = await world.claim()
        back = {"session_id": lease["session_id"], "attempt": lease["attempt"], "error": "no room"}
        await world.node("/nodes/n1/release", back)
    (told,) = (await world.get("/rollout/task/t1"))["results"]
    assert told["error"] == "attempts exhausted: handed back 2 times, at last by node n1: no room"


async def test_a_draining_node_is_told_and_gets_no_more(world: World) -> None:
    await world.join()
    answer = await world.admin.delete("/nodes/n1")
    assert answer.json()["draining"] is True
    await world.submit(task())
    assert await world.claim() == []
    assert (await world.node("/nodes/n1/heartbeat", {}))["drain"] is True
    assert (await world.admin.delete("/nodes/n9")).status_code == 404


async def test_workers_behind_one_port_are_one_node(world: World) -> None:
    for index in range(3):
        url = f"http://gw:1/workers/{index}"
        await world.join(f"gw-{index}", worker_of="gw", gateway_url=url, max_run_workers=4)
    await world.join("alone")
    await world.submit(task(num_samples=3))
    for index in range(2):
        (lease,) = await world.claim(f"gw-{index}", room=1)
        held = [{"session_id": lease["session_id"], "attempt": 1, "state": "RUNNING"}]
        await world.node(f"/nodes/gw-{index}/heartbeat", {"held": held, "load": {"run_inflight": index + 1}})
    alone, whole = await world.get("/nodes")
    assert (alone["node_id"], alone["workers"]) == ("alone", 1)
    told = [whole[name] for name in ("node_id", "workers", "gateway_url", "max_run_workers", "sessions", "draining")]
    assert told == ["gw", 3, "http://gw:1", 12, 2, False]
    assert whole["metrics"]["run_inflight"] == 3
    assert await world.get("/nodes/gw") == whole
    assert (await world.get("/nodes/gw-1"))["metrics"]["run_inflight"] == 2
    assert (await world.get("/rollout/status"))["nodes"]["total"] == 2
    assert (await world.admin.delete("/nodes/gw-1")).json()["draining"] is True
    assert (await world.get("/nodes/gw"))["draining"] is False
    assert (await world.admin.delete("/nodes/gw")).json()["draining"] is True
    for index in range(3):
        assert await world.claim(f"gw-{index}") == []
    assert len(await world.claim("alone")) == 1


async def test_a_node_that_was_single_before_hides_none_of_its_workers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(nodes, "FIRST_SECONDS", -1.0)
        await world.join("gw", gateway_url="http://gw:1", max_run_workers=4)
    for index in range(2):
        await world.join(f"gw-{index}", worker_of="gw", gateway_url=f"http://gw:1/workers/{index}", max_run_workers=4)
    (whole,) = await world.get("/nodes")
    told = [whole[name] for name in ("node_id", "workers", "gateway_url", "max_run_workers", "healthy")]
    assert told == ["gw", 2, "http://gw:1", 8, True]


async def test_a_node_that_makes_no_sense_is_refused(world: World) -> None:
    good = {"node_id": "n", "gateway_url": "http://x", "max_run_workers": 1, "max_postrun_workers": 1}
    for change in (
        {"gateway_url": "ftp://x"},
        {"max_run_workers": 0},
        {"node_id": "a/b"},
        {"max_init_workers": "many"},
    ):
        spec = {**good, "max_init_workers": 1, **change}
        assert (await world.as_("node").post("/nodes/register", json=spec)).status_code == 422, change


async def test_a_claim_that_makes_no_sense_is_refused(world: World) -> None:
    await world.join()
    for claim in ({"room": 0}, {"room": 10**9}, {"room": 1, "wait": -1}, {"room": 1, "wait": 1e9}):
        assert (await world.as_("node").post("/nodes/n1/claim", json=claim)).status_code == 422, claim


async def test_a_server_that_goes_lets_those_go_who_wait(world: World) -> None:
    await world.join()
    waiting = asyncio.create_task(world.claim(wait=50))
    done, _ = await asyncio.wait({waiting}, timeout=0.1)
    assert not done
    await world.server.close()
    async with asyncio.timeout(10):
        assert await waiting == []


async def test_a_large_delivery_does_not_hold_up_others(world: World) -> None:
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    large = msgspec.structs.replace(completion(), metadata={"blob": "x" * 8_000_000})
    body = to_json(Delivery(session_id=lease["session_id"], attempt=1, completions=[large]))
    async with httpx.AsyncClient(base_url=world.url, timeout=60, trust_env=False) as other:
        sending = asyncio.create_task(world.as_("node").post("/nodes/n1/deliveries", content=body))
        while not sending.done():
            assert (await other.get("/health")).status_code == 200
    assert sending.result().status_code == 200
    assert len(await world.ledger.completions("t1-0")) == 1
