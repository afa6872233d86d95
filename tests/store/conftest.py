"""A store in a fresh folder or a real PostgreSQL, and disks that are small or can't be written (where this machine
lets us mount)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from polar.store import Ledger, open_store
from tests.store.postgres_server import Server

Mount = Callable[..., None]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """One for all tests; it does not sync, so it is not for tests of what survives."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """A database without a store in it."""
    yield postgres_server.url()
    postgres_server.clean()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for a store, in each of the databases."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/polar.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[Ledger]:
    """An open store, in each of the databases."""
    store = open_store(store_url)
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def sqlite_store(tmp_path: Path) -> AsyncIterator[Ledger]:
    """An open store in a file."""
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
    """A running ``writer_process.py`` (or another one); ``lines`` are the ids it was told are kept."""

    def __init__(self, database: Path | str, session: str, count: int, module: str = "writer_process") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"tests.store.{module}", str(database), session, str(count)],
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
def writing() -> Iterator[Callable[..., Process]]:
    """``writing(database, session, count)``: another process that writes; killed at the end of the test."""
    started: list[Process] = []

    def start(database: Path | str, session: str, count: int, **more: str) -> Process:
        started.append(Process(database, session, count, **more))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ValueError):  # killed and read already
            process.kill()
