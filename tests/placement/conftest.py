from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.making import Forked, ScriptedProcess, scripted_process
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model

TURNS = 6
STEPS = [Step(text=f"reply number {turn} is a few tokens long", token_delay=0.003) for turn in range(TURNS)]
"""They take some time for each token, so that whatever happens finds calls in flight."""


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    folder = tmp_path_factory.mktemp("engine")
    with scripted_process(make_tiny_model(folder / "model"), STEPS, folder) as running:
        yield running


@pytest.fixture(scope="session")
def polar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    forked = Forked(tmp_path_factory.mktemp("forked"))
    yield forked
    forked.close()
