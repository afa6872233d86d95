from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.making import ScriptedProcess, scripted_process
from tests.faults.fleet import GATES, TURNS
from tests.store.conftest import mount as mount
from tests.store.postgres_server import Server
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")  # its log, which is read again and again, must not grow too large
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    """It takes some time for each token, so that a fault finds calls in flight; a task whose instruction is one of
    ``GATES`` has its first replies held until the test releases them."""
    held = [Step(when=gate, text="this was held back", hold_after=2, hold=gate) for gate in GATES]
    steps = [Step(text=f"reply number {turn} is a few tokens long", token_delay=0.003) for turn in range(TURNS)]
    with scripted_process(tiny_model, [*held, *steps], tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture
def database() -> Iterator[Server]:
    """A PostgreSQL that syncs to disk, for this test alone."""
    server = Server(durable=True)
    try:
        server.start()
        yield server
    finally:
        server.remove()
