"""SIGKILL at any moment loses nothing that was told."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.store import open_store
from tests.store import making, writer_process


async def _kill_and_check(database: Path, round_: int, writing: Callable) -> None:
    session = f"round-{round_}"
    process = writing(database, session, 3000)
    told = process.read(random.Random(round_).randrange(1, 400))
    told += process.kill()
    assert len(told) < 3000, "it was killed while it wrote"

    store = open_store(str(database))
    await store.open()
    stored = {c.completion_id: c for c in await store.completions(session)}
    await store.close()
    assert set(told) <= set(stored)
    for completion in stored.values():
        assert making.same(completion, writer_process.written(session, completion.seq))
    with sqlite3.connect(database) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_killed_writer_loses_nothing_it_was_told(tmp_path: Path, writing: Callable) -> None:
    for round_ in range(3):
        await _kill_and_check(tmp_path / "polar.db", round_, writing)


@pytest.mark.slow
async def test_a_writer_killed_twenty_times_over_one_file_loses_nothing(tmp_path: Path, writing: Callable) -> None:
    for round_ in range(100, 120):
        await _kill_and_check(tmp_path / "polar.db", round_, writing)
