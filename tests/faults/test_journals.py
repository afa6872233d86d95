"""A node's journal over its life: what the server has leaves it, what it has not stays, restarts or not."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.making import ScriptedProcess
from tests.faults.fleet import Fleet, Part, check_all, until

pytestmark = pytest.mark.slow


def _kept(gateway: Part, table: str) -> int:
    with closing(sqlite3.connect(f"file:{gateway.data}/journal.db?mode=ro", uri=True)) as db:
        count: int = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return count


async def test_a_node_forgets_what_the_server_has_and_nothing_else(engine: ScriptedProcess, tmp_path: Path):
    gate, samples = "hold until up", 4
    with Fleet(tmp_path, engine, gateways=1, retention={"days": 0}) as fleet:
        (gateway,) = fleet.gateways
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=3))
            await check_all(fleet, client, "t", samples)
            assert _kept(gateway, "completions") == 3 * samples
            # These end while the server is away, and are all that the node has to keep over its restart.
            await client.submit(fleet.a_task("u", samples=samples, turns=2, instruction=gate))
            await fleet.in_flight(samples)
            fleet.server.kill()
            fleet.release(gate)
            await until(lambda: _kept(gateway, "undelivered") == samples, "all have ended here")
            gateway.kill()
            gateway.start()
            await until(lambda: _kept(gateway, "completions") == 2 * samples, "what the server has is gone")
            assert _kept(gateway, "tasks") == 1
            fleet.server.start()
            fleet.server.wait()
            status = await check_all(fleet, client, "u", samples)
            assert {(each.status, each.attempt) for each in status.results} == {("COMPLETED", 1)}
            gateway.stop()
            gateway.start()
            await until(lambda: _kept(gateway, "completions") == 0, "nothing is left")
        fleet.stop()
