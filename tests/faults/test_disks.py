"""A disk that becomes full under a server, a gateway, or both in one process, and gets room again: no session ends
because of it, and nothing that was told is lost."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.rollout.dispatch import LEASE_SECONDS
from tests.cli.making import ScriptedProcess
from tests.faults.fleet import Fleet, Part, check_all

pytestmark = pytest.mark.slow


def fill(folder: Path) -> Path:
    """Take all the room that there is."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler


@pytest.mark.parametrize("where", ["all", "server", "gateway"])
async def test_a_disk_becomes_full_and_has_room_again(
    engine: ScriptedProcess, tmp_path: Path, mount: Callable[..., None], where: str
):
    samples = 24
    fleet = Fleet(tmp_path, engine, gateways=0 if where == "all" else 1)
    part: Part = fleet.gateways[0] if where == "gateway" else fleet.server
    part.data.mkdir(parents=True)
    mount(part.data, "-t", "tmpfs", "-o", "size=24m", "none")
    with fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples))
            await fleet.replies(10)
            filler = await asyncio.to_thread(fill, part.data)
            await fleet.parts[-1].says("disk is full")
            if where != "gateway":  # longer than a lease: nobody can renew one meanwhile
                await asyncio.sleep(1.2 * LEASE_SECONDS)
            os.truncate(filler, 0)
            status = await check_all(fleet, client, "t", samples)
            assert {each.status for each in status.results} == {"COMPLETED"}
            if where == "server":
                assert {each.attempt for each in status.results} == {1}, "its node only had to wait"
        fleet.stop()
