"""The real harnesses, installed where they are missing, and a scripted engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.harnesses.install import install
from polar.runtimes.bubblewrap import find_bwrap
from tests.cli.making import ScriptedProcess, scripted_process
from tests.e2e.scripts import STEPS
from tests.support.tinymodel import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def sandbox() -> None:
    if find_bwrap() is None:
        pytest.skip("no bubblewrap here")


@pytest.fixture(scope="session")
def harnesses() -> None:
    """pi and mini-swe-agent, at their pinned versions."""
    for name in ("pi", "mini_swe_agent"):
        install(name)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    with scripted_process(tiny_model, STEPS, tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture
def to_engine(engine: ScriptedProcess) -> list[str]:
    return ["--engine", "openai", "--engine-url", engine.url]
