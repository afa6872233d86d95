"""SIGTERM: what runs may end, what can't is handed back, and that costs no session one of its attempts."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from polar.store.ledger import MAX_ATTEMPTS
from tests.cli.making import ScriptedProcess
from tests.faults.fleet import Fleet, check_all

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
