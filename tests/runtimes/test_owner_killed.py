"""The gateway is killed in the middle: no process outlives it, and the next start finds what it left on disk."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from polar.contract.task import RuntimeSpec
from polar.runtimes import BubblewrapBackend, remove_leftovers, supervised
from tests.runtimes.making import processes_with, until

OWNER = """
import asyncio, sys
from pathlib import Path
from polar.runtimes import backend
from polar.contract.runtime import Command
from polar.contract.task import RuntimeSpec

async def main():
    walls, folder, mark = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    box = await backend(sandbox=walls).create(RuntimeSpec(), folder=folder / "runtime")
    line = f"setsid sh -c 'sleep 300; : {mark}' & (setsid setsid sh -c 'sleep 300; : {mark}' &); sleep 300"
    await box.exec(Command(line), timeout=300, logs=folder, name="agent")

asyncio.run(main())
"""


@pytest.fixture
async def killed_owner(walls: str, tmp_path: Path) -> Path:
    """A results folder in which a gateway ran a sandbox until it was killed."""
    if walls == "bubblewrap" and not (probe := await BubblewrapBackend().probe()).ok:
        pytest.skip(f"no bubblewrap here: {probe.detail}")
    mark = f"polar-test-{uuid.uuid4().hex}"
    folder = tmp_path / "results" / "session"
    folder.mkdir(parents=True)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, walls, str(folder), mark])
    try:
        await until(lambda: len([pid for pid in processes_with(mark) if pid != owner.pid]) == 2)
        family = psutil.Process(owner.pid).children(recursive=True)
        assert len(family) >= 3
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    await until(lambda: not processes_with(mark))
    await until(lambda: not any(process.is_running() for process in family))
    return tmp_path / "results"


async def test_nothing_runs_or_stays_mounted(killed_owner):
    assert str(killed_owner) not in Path("/proc/self/mountinfo").read_text()
    assert (killed_owner / "session" / "runtime" / "workspace").is_dir()


async def test_the_next_start_removes_what_is_ownerless_and_nothing_else(killed_owner):
    living = await BubblewrapBackend().create(RuntimeSpec(), folder=killed_owner / "living")
    (killed_owner / "session" / "agent.stdout").write_text("a log")
    try:
        assert remove_leftovers(killed_owner) == 1
        assert remove_leftovers(killed_owner) == 0
        assert not (killed_owner / "session" / "runtime").exists()
        assert (killed_owner / "session" / "agent.stdout").exists()
        assert (killed_owner / "living" / "workspace").is_dir()
    finally:
        await living.close()


async def test_a_first_process_that_hangs_takes_everybody_with_it(make_any, walls, tmp_path, monkeypatch):
    """It is stopped here, so it can't do as it is told; what it started goes all the same."""
    monkeypatch.setattr(supervised, "END_SECONDS", 0.1)
    await (await make_any(walls)).runtime.close()
    before = set(psutil.Process().children(recursive=True))
    box = await make_any(walls)
    new = set(psutil.Process().children(recursive=True)) - before
    [first] = {each for each in new if "python" in each.name()}
    mark = f"polar-test-{uuid.uuid4().hex}"
    line = f"setsid sh -c 'sleep 300; : {mark}' & (setsid setsid sh -c 'sleep 300; : {mark}' &); sleep 300"
    running = asyncio.create_task(box.sh(line))
    await until(lambda: len(processes_with(mark)) == 2)
    family = [first, *first.children(recursive=True)]
    first.suspend()
    await box.runtime.kill()
    await until(lambda: not processes_with(mark))
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family)
    await asyncio.gather(running, return_exceptions=True)


async def test_sandboxes_that_were_to_come_from_a_killed_process_start_all_the_same(make_any, walls):
    await make_any(walls)
    warm = next(each for each in psutil.Process().children() if any("supervisor" in part for part in each.cmdline()))
    warm.suspend()
    starting = [asyncio.create_task(make_any(walls)) for _ in range(3)]
    await asyncio.sleep(0)  # each has asked it
    warm.kill()
    for box in await asyncio.gather(*starting):
        assert (await box.sh("echo here")).out == "here\n"
