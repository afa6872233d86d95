from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.contract.runtime import Runtime
from polar.contract.task import RuntimeSpec
from polar.runtimes import BubblewrapBackend, backend


@pytest.fixture(params=["bubblewrap", "none"])
async def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Runtime]:
    """A sandbox whose agent has written answer.txt, with walls and without."""
    if request.param == "bubblewrap" and not (probe := await BubblewrapBackend().probe()).ok:
        pytest.skip(f"no bubblewrap here: {probe.detail}")
    made = await backend(sandbox=request.param).create(RuntimeSpec(), folder=tmp_path / "runtime")
    await made.write_file("answer.txt", b"42\n")
    await made.kill()
    yield made
    await made.close()
