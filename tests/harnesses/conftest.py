"""The real harnesses in a real sandbox, at a real gateway, with a scripted model behind it that has Qwen3's own
tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from polar.runtimes.bubblewrap import find_bwrap
from tests.harnesses.running import Ran, qwen3_folder, run_session
from tests.rendering.conftest import assets

__all__ = ["Ran", "Run", "assets"]

Run = Callable[..., Awaitable[Ran]]


@pytest.fixture(scope="session")
def qwen3(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's model folder, but for the weights."""
    return qwen3_folder(assets, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def session(qwen3: Path, tmp_path: Path) -> Run:
    """Run one session of a harness: see ``run_session``."""
    if find_bwrap() is None:
        pytest.skip("no bubblewrap here")

    async def go(*args: object, **options: object) -> Ran:
        return await run_session(qwen3, tmp_path, *args, **options)  # type: ignore[arg-type]

    return go
