"""SIGTERM: what runs may end, what can't is handed back, and that costs no session one of its attempts."""

from __future__ import annotations

import signal
from pathlib import Path

import aiohttp
import pytest

from polar.contract.rollout import BARE_NODE
from polar.store.ledger import MAX_ATTEMPTS
from tests.cli.making import ScriptedProcess
from tests.faults.fleet import ADMIN, NODE, Fleet, check_all, until

pytestmark = pytest.mark.slow


async def test_what_runs_may_end(engine: ScriptedProcess, tmp_path: Path):
    samples, few = 32, {"init": 2, "ready": 2, "run": 2, "post_run": 2}
    with Fleet(tmp_path, engine, gateways=2, pools=few) as fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=3))
            await fleet.replies(3)
            for gateway in fleet.gateways:
                gateway.signal(signal.SIGTERM)
            for gateway in fleet.gateways:
                gateway.ends(0)
            ended = (await client.status("t")).completed_sessions
            assert 0 < ended < samples, "those that ran have ended, those that waited wait"
            for gateway in fleet.gateways:
                gateway.start()
            status = await check_all(fleet, client, "t", samples)
            assert {(each.status, each.attempt) for each in status.results} == {("COMPLETED", 1)}
        fleet.stop()


async def test_a_node_that_drains_opens_no_bare_session_and_says_where_to_ask(
    engine: ScriptedProcess, tmp_path: Path
):
    with Fleet(tmp_path, engine, gateways=1) as fleet:
        (gateway,) = fleet.gateways
        headers = {"Authorization": f"Bearer {NODE}"}
        as_its_server = {"metadata": {BARE_NODE: "node-0"}}
        async with fleet.client() as client, aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{gateway.url}/sessions", json=as_its_server) as reply:
                assert reply.status == 200
            assert (await client.drain("node-0")).draining
            await gateway.says("draining: no more sessions are taken")
            async with http.post(f"{gateway.url}/sessions", json=as_its_server) as reply:
                assert reply.status == 503
                detail = (await reply.json())["detail"]
            assert "node node-0 drains" in detail
            assert f"ask the rollout server ({fleet.server.url})" in detail
        fleet.stop()


@pytest.mark.parametrize(("gateways", "stops"), [(0, 1), (1, MAX_ATTEMPTS)])
async def test_what_is_handed_back_does_not_count(engine: ScriptedProcess, tmp_path: Path, gateways: int, stops: int):
    gate, samples = f"hold until {('stopped', 'halted')[gateways]}", 4
    with Fleet(tmp_path, engine, gateways=gateways, limits={"drain_seconds": 0.5}) as fleet:
        part = fleet.parts[-1]
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=2, instruction=gate))
            for _ in range(stops):
                await fleet.in_flight(samples)
                part.stop()
                part.start()
            await fleet.in_flight(samples)
            fleet.release(gate)
            status = await check_all(fleet, client, "t", samples)
            assert {(each.status, each.attempt) for each in status.results} == {("COMPLETED", stops + 1)}
        fleet.stop()


async def test_a_gateway_that_drains_is_seen_to_and_ends_its_bare_sessions(engine: ScriptedProcess, tmp_path: Path):
    gate = "hold until known"
    with Fleet(tmp_path, engine, gateways=1) as fleet:
        (gateway,) = fleet.gateways
        headers = {"Authorization": f"Bearer {ADMIN}"}
        async with fleet.client() as client, aiohttp.ClientSession(fleet.server.url, headers=headers) as http:
            async with http.post("/sessions", json={"session_id": "bare"}) as reply:
                assert reply.status == 200
            await client.submit(fleet.a_task("t", samples=1, turns=2, instruction=gate))
            await fleet.in_flight(1)
            gateway.signal(signal.SIGTERM)
            await until(lambda: fleet._nodes()[0]["draining"], "the server knows that it drains")
            async with http.post("/sessions", json={"session_id": "late"}) as reply:
                assert reply.status == 503
                assert "drains" in (await reply.json())["detail"]
            fleet.release(gate)
            gateway.ends(0)
            bare = await client.get("/sessions/bare")
            assert (bare["status"], "cut off" in bare["error"]) == ("ERROR", True)
            assert (await client.status("t")).completed_sessions == 1
        fleet.stop()
