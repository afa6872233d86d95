"""A disk that is full or can't be written: one line says so, what was told stays, and it goes on when it can."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.contract.errors import UsageError
from polar.store import SQLiteStore, Store, StoreFailure, sqlite
from tests.store import making

Mount = Callable[..., None]


async def _fill(store: Store, first: int) -> tuple[set[str], StoreFailure]:
    kept: set[str] = set()
    for seq in range(first, first + 2000):
        completion = making.completion(seq=seq, tokens=2000)
        try:
            await store.put_completion(completion)
        except StoreFailure as failure:
            return kept, failure
        kept.add(completion.completion_id)
    raise AssertionError("the disk never became full")


async def test_a_full_disk_loses_nothing_told_and_goes_on_when_there_is_room(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path, "-t", "tmpfs", "-o", "size=3m", "none")
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    await store.put_session(making.session())
    kept, failure = await _fill(store, 0)
    assert "the disk is full; free some space" in str(failure)
    assert "\n" not in str(failure)
    assert kept
    assert {c.completion_id for c in await store.completions("s")} == kept

    mount(tmp_path, "-o", "remount,size=32m")
    again = [making.completion(seq=seq, tokens=2000) for seq in range(len(kept), len(kept) + 20)]
    await asyncio.gather(*(store.put_completion(completion) for completion in again))
    await store.close()
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    stored = await store.completions("s")
    await store.close()
    assert {c.completion_id for c in stored} == kept | {c.completion_id for c in again}
    assert all(making.same(c, making.completion(seq=c.seq, tokens=2000)) for c in stored)


async def test_a_group_that_does_not_fit_fails_only_what_does_not_fit(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path, "-t", "tmpfs", "-o", "size=3m", "none")
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    await store.put_session(making.session())
    sizes = [10, 150_000, 10, 150_000, 10]  # 1.8 MB each of the two
    outcomes = await asyncio.gather(
        *(store.put_completion(making.completion(seq=seq, tokens=size)) for seq, size in enumerate(sizes)),
        return_exceptions=True,
    )
    kept = [seq for seq, outcome in enumerate(outcomes) if outcome is None]
    assert {0, 2, 4} <= set(kept)
    assert len(kept) < 5
    assert [c.seq for c in await store.completions("s")] == kept
    await store.close()


async def test_opening_on_a_full_disk_is_one_line(tmp_path: Path, mount: Mount) -> None:
    mount(tmp_path, "-t", "tmpfs", "-o", "size=64k", "none")
    store = SQLiteStore(tmp_path / "polar.db")
    with pytest.raises(UsageError, match="the disk is full") as caught:
        await store.open()
    assert "\n" not in str(caught.value)
    await store.close()


async def test_a_write_that_is_too_large_for_the_room_left_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite._open_for_writing

    def small(path: Path) -> sqlite3.Connection:
        db = connect(path)
        db.execute("PRAGMA max_page_count = 40")
        return db

    monkeypatch.setattr(sqlite, "_open_for_writing", small)
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    await store.put_session(making.session())
    sizes = [10, 200_000, 10, 10]
    outcomes = await asyncio.gather(
        *(store.put_completion(making.completion(seq=seq, tokens=size)) for seq, size in enumerate(sizes)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), StoreFailure, type(None), type(None)]
    assert "full" in str(outcomes[1])
    assert [c.seq for c in await store.completions("s")] == [0, 2, 3]
    await store.close()


async def test_a_finished_store_on_read_only_media_can_be_read_and_not_written(tmp_path: Path, mount: Mount) -> None:
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    await store.put_session(making.session())
    await store.close()
    mount(tmp_path, "--bind", str(tmp_path))
    mount(tmp_path, "-o", "remount,bind,ro")

    reader = SQLiteStore(tmp_path / "polar.db", read_only=True)
    await reader.open()
    assert await reader.sessions() == [making.session()]
    await reader.close()
    writer = SQLiteStore(tmp_path / "polar.db")
    with pytest.raises(UsageError, match=r"can't write to .*[Rr]ead-only") as caught:
        await writer.open()
    assert "\n" not in str(caught.value)
    await writer.close()
