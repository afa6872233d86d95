from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from polar.runtimes import BubblewrapBackend
from tests.attacks.service import Service
from tests.cli.making import scripted_process
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model


@pytest.fixture(scope="session")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """It takes some time for each token, so that calls are in flight together."""
    model = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    steps = [Step(text="a reply of a few tokens", token_delay=0.02)]
    with scripted_process(model, steps, tmp_path_factory.mktemp("engine")) as running:
        yield running.url


@pytest.fixture(scope="module", params=["all", "apart"])
def service(
    request: pytest.FixtureRequest, engine_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    probe = asyncio.run(BubblewrapBackend().probe())
    if not probe.ok:
        pytest.skip(f"no bubblewrap here: {probe.detail}")
    with Service(tmp_path_factory.mktemp("service"), engine_url, apart=request.param == "apart") as running:
        yield running
