"""Processes of the service are killed at random points, and started again: nothing that was told is lost, nothing is
there twice, every session ends, and nothing goes on running.

A failing run is repeated with its seed, which is in the test's name.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.making import ScriptedProcess, scripted_process
from tests.faults.fleet import Fleet, check_all
from tests.support.script import Step

pytestmark = pytest.mark.slow
TURNS = 6


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    """It takes some time for each token, so that a kill finds calls in flight."""
    steps = [Step(text=f"reply number {turn} is a few tokens long", token_delay=0.003) for turn in range(TURNS)]
    with scripted_process(tiny_model, steps, tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.mark.parametrize("seed", range(3))
async def test_one_process_is_killed_again_and_again(engine: ScriptedProcess, tmp_path: Path, seed: int):
    chance, samples = random.Random(seed), 16
    with Fleet(tmp_path, engine.url) as fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=TURNS))
            for _ in range(2):
                await fleet.replies(len(fleet.received()) + chance.randrange(1, 20))
                fleet.server.kill()
                fleet.server.start()
                fleet.server.wait()
            status = await check_all(fleet, client, "t", samples)
            assert max(result.attempt for result in status.results) > 1, "a session was cut off"
            assert {result.status for result in status.results} == {"COMPLETED"}
    fleet.server.nothing_left()


@pytest.mark.parametrize("seed", range(6))
async def test_server_and_gateways_are_killed(engine: ScriptedProcess, tmp_path: Path, seed: int):
    chance, samples = random.Random(100 + seed), 24
    with Fleet(tmp_path, engine.url, gateways=2) as fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=TURNS))
            for _ in range(3):
                await fleet.replies(len(fleet.received()) + chance.randrange(1, 12))
                victims = chance.sample(fleet.parts, chance.choice([1, 1, 2]))
                for part in victims:
                    part.kill()
                await asyncio.sleep(chance.uniform(0, 0.5))
                for part in victims:
                    part.start()
            await check_all(fleet, client, "t", samples)
    for part in fleet.gateways:
        part.nothing_left()
