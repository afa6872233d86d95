"""Processes of the service are killed at random points, and started again: nothing that was told is lost, nothing is
there twice, every session ends, and nothing goes on running.

A failing run is repeated with its seed, which is in the test's name.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from polar.runtimes.bubblewrap import find_bwrap
from tests.cli.making import ScriptedProcess
from tests.faults.fleet import SEEDS, Fleet, check_all

pytestmark = pytest.mark.slow

SANDBOXES = ("none", "bubblewrap")


def the_sandbox(seed: int) -> str:
    """Each in turn."""
    chosen = SANDBOXES[seed % 2]
    if chosen == "bubblewrap" and find_bwrap() is None:
        pytest.skip("bubblewrap is not installed")
    return chosen


@pytest.mark.parametrize("seed", SEEDS)
async def test_one_process_is_killed_again_and_again(engine: ScriptedProcess, tmp_path: Path, seed: int):
    chance, samples = random.Random(seed), 24
    with Fleet(tmp_path, engine, sandbox=the_sandbox(seed)) as fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples))
            for _ in range(2):
                await fleet.replies(chance.randrange(1, 30))
                fleet.server.kill()
                fleet.server.start()
                fleet.server.wait()
            status = await check_all(fleet, client, "t", samples)
            assert max(result.attempt for result in status.results) > 1, "a session was cut off"
            assert {result.status for result in status.results} == {"COMPLETED"}
        fleet.stop()


@pytest.mark.parametrize("seed", SEEDS)
async def test_server_and_gateways_are_killed(engine: ScriptedProcess, tmp_path: Path, seed: int):
    chance, samples = random.Random(100 + seed), 72
    with Fleet(tmp_path, engine, gateways=2, sandbox=the_sandbox(seed)) as fleet:
        rounds = [fleet.servers, [chance.choice(fleet.gateways)], fleet.parts]
        chance.shuffle(rounds)
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples))
            for victims in rounds:
                await fleet.replies(chance.randrange(1, 40))
                for part in victims:
                    part.kill()
                await asyncio.sleep(chance.uniform(0, 0.5))
                for part in victims:
                    part.start()
            status = await check_all(fleet, client, "t", samples)
            assert {result.status for result in status.results} == {"COMPLETED"}
        for part in fleet.parts:
            part.wait()
        fleet.stop()
