"""Servers over a PostgreSQL: it is killed under them, or one of them dies for good."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.cli.making import ScriptedProcess
from tests.faults.fleet import SEEDS, Fleet, check_all
from tests.store.postgres_server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", SEEDS[:2])
async def test_the_database_is_killed(engine: ScriptedProcess, database: Server, tmp_path: Path, seed: int):
    chance, samples = random.Random(seed), 24
    store = {"store": database.url()}
    with Fleet(tmp_path, engine, gateways=seed % 2, server=store) as fleet:  # in one process, or in two
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples))
            for _ in range(2):
                await fleet.replies(chance.randrange(1, 20))
                await asyncio.to_thread(database.kill)
                await asyncio.sleep(chance.uniform(0, 3))
                await asyncio.to_thread(database.start)
            status = await check_all(fleet, client, "t", samples)
            assert {(each.status, each.attempt) for each in status.results} == {("COMPLETED", 1)}
        fleet.stop()


async def test_one_of_two_servers_dies_for_good(engine: ScriptedProcess, database: Server, tmp_path: Path):
    samples = 32
    with Fleet(tmp_path, engine, gateways=2, servers=2, server={"store": database.url()}) as fleet:
        dead, alive = fleet.servers
        async with fleet.client(alive) as client:
            await client.submit(fleet.a_task("t", samples=samples))
            await fleet.replies(15)
            dead.kill()
            await fleet.replies(15)
            # Its operator sends the node to the other one; what it holds in its journal goes there, too.
            moved = fleet.gateways[0]
            moved.stop()
            moved.settings["server"] = alive.url
            moved.start()
            status = await check_all(fleet, client, "t", samples)
            assert {each.status for each in status.results} == {"COMPLETED"}
            moved.wait()
        fleet.stop()
