"""One command line, imported once, and one scripted engine for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.making import Forked, ScriptedProcess, scripted_process
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model


@pytest.fixture(scope="session")
def polar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    forked = Forked(tmp_path_factory.mktemp("forked"))
    yield forked
    forked.close()


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    folder = tmp_path_factory.mktemp("engine")
    steps = [Step(text=f"reply {turn}") for turn in range(8)]
    with scripted_process(make_tiny_model(folder / "model"), steps, folder) as running:
        yield running


@pytest.fixture
def to_engine(engine: ScriptedProcess) -> list[str]:
    """The options that name the scripted engine."""
    return ["--engine", "openai", "--engine-url", engine.url]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty folder to be in."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def installed_pi(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a host where pi is installed, by its looks."""
    home = tmp_path_factory.mktemp("home")
    package = home / "harnesses/pi/node_modules/@mariozechner/pi-coding-agent"
    (package / "dist").mkdir(parents=True)
    (package / "dist" / "cli.js").write_text("")
    (package / "package.json").write_text('{"version": "0.73.1"}')
    (home / "bin").mkdir()
    (home / "bin" / "node").write_text("#!/bin/sh\necho v20.20.2\n")
    (home / "bin" / "node").chmod(0o755)
    return {"POLAR_HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin"}
