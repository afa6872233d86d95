"""Which engine a session ran on must not show in what a trainer gets: the same conversation at temperature 0 gives
the same replies and the same traces on a vLLM, an SGLang and the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.engines import make_engine
from tests.engines.real.conftest import MakeWorld
from tests.engines.real.session import hold, kind_of

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_gives_the_traces_of_the_embedded_engine(
    kind: str, weights: Path, gateway: MakeWorld, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue(kind)
    ours = await gateway(make_engine("local", model=str(weights)), "local")
    theirs = await gateway(make_engine(kind, url=url, mode="tito"), kind)
    assert await hold(ours) == await hold(theirs)
    assert kind_of(await ours.trajectory()) == kind_of(await theirs.trajectory())
