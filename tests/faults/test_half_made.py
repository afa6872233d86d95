"""A sandbox that could not be made whole leaves neither files nor an open lock behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.contract.runtime import RuntimeFailure
from polar.contract.task import RuntimeSpec
from polar.runtimes.process import ProcessBackend


def open_below(folder: Path) -> list[str]:
    """What this process has open there."""
    found = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return [each for each in found if each.startswith(str(folder))]


async def test_a_disk_without_room_for_it(tmp_path: Path, mount: Callable[..., None]):
    mount(tmp_path, "-t", "tmpfs", "-o", "nr_inodes=5", "none")
    with pytest.raises(RuntimeFailure, match="No space left"):
        await ProcessBackend().create(RuntimeSpec(), folder=tmp_path / "sandbox")
    assert list(tmp_path.iterdir()) == []
    assert open_below(tmp_path) == []


async def test_a_session_that_is_cut_off_at_once(tmp_path: Path):
    making = asyncio.create_task(ProcessBackend().create(RuntimeSpec(), folder=tmp_path / "sandbox"))
    await asyncio.sleep(0)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert list(tmp_path.iterdir()) == []
    assert open_below(tmp_path) == []
