from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from polar.contract.runtime import Mount
from polar.contract.task import RuntimeSpec
from polar.runtimes import BubblewrapBackend, ProcessBackend
from polar.runtimes.supervised import Limits
from tests.runtimes.making import Box

MakeBox = Callable[..., Awaitable[Box]]
WALLS = {"bubblewrap": BubblewrapBackend, "none": ProcessBackend}


@pytest.fixture(params=list(WALLS))
def walls(request: pytest.FixtureRequest) -> str:
    """Both backends: what a test says holds with walls and without."""
    return str(request.param)


@pytest.fixture
async def make_any(tmp_path: Path) -> AsyncIterator[MakeBox]:
    made: list[Box] = []
    numbers = itertools.count()

    async def make(
        walls: str, spec: RuntimeSpec | None = None, *, mounts: tuple[Mount, ...] = (), limits: Limits | None = None
    ) -> Box:
        backend = WALLS[walls](limits)
        probe = await BubblewrapBackend().probe() if walls == "bubblewrap" and not made else None
        if probe and not probe.ok:
            pytest.skip(f"no bubblewrap here: {probe.detail}")
        folder = tmp_path / f"sandbox-{next(numbers)}"
        box = Box(await backend.create(spec or RuntimeSpec(), folder=folder, mounts=mounts), tmp_path / "logs")
        made.append(box)
        return box

    yield make
    for box in made:
        await box.runtime.close()


@pytest.fixture
def make_box(make_any: MakeBox) -> MakeBox:
    async def make(**kwargs: object) -> Box:
        return await make_any("bubblewrap", **kwargs)

    return make
