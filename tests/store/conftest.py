"""A store in a fresh folder, and disks that are small or can't be written (where this machine lets us mount)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from polar.store import Store, open_store

Mount = Callable[..., None]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = open_store(str(tmp_path / "polar.db"))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
def mount() -> Iterator[Mount]:
    """``mount(target, *options)`` for the length of the test; skips where mounting is not allowed."""
    mounted: list[Path] = []

    def mount(target: Path, *options: str) -> None:
        try:
            done = subprocess.run(["mount", *options, str(target)], capture_output=True, timeout=20)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        if target not in mounted:
            mounted.append(target)

    yield mount
    for target in mounted:
        subprocess.run(["umount", "-l", str(target)], check=True, timeout=20)


class Process:
    """A running ``writer_process.py``; ``lines`` are the ids it was told are kept."""

    def __init__(self, database: Path, session: str, count: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.writer_process", str(database), session, str(count)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._out = self._process.stdout
        assert self._out.readline() == "ready\n"

    def read(self, count: int) -> list[str]:
        return [self._out.readline().strip() for _ in range(count)]

    def kill(self) -> list[str]:
        """SIGKILL; what it had still printed."""
        self._process.kill()
        rest, _ = self._process.communicate(timeout=30)
        return rest.split()


@pytest.fixture
def writing() -> Iterator[Callable[[Path, str, int], Process]]:
    """``writing(database, session, count)``: another process that writes; killed at the end of the test."""
    started: list[Process] = []

    def start(database: Path, session: str, count: int) -> Process:
        started.append(Process(database, session, count))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ValueError):  # killed and read already
            process.kill()
