"""Writes share a commit, and nothing else: neither each other's failures nor each other's cancellation."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from polar.contract.errors import PolarError
from polar.store import SQLiteStore, Store, StoreConflict, StoreFailure
from tests.store import making


async def test_writes_that_wait_together_are_committed_together(sqlite_store: Store, tmp_path: Path) -> None:
    log = tmp_path / "polar.db-wal"
    await sqlite_store.put_session(making.session())
    start = log.stat().st_size
    for seq in range(30):
        await sqlite_store.put_completion(making.completion(seq=seq))
    one_by_one = log.stat().st_size - start
    await asyncio.gather(*(sqlite_store.put_completion(making.completion(seq=seq)) for seq in range(30, 60)))
    together = log.stat().st_size - start - one_by_one
    # Every commit writes at least the page of the table and one of each index again.
    assert together < one_by_one / 4


async def test_every_write_that_was_awaited_is_read(store: Store) -> None:
    await store.put_session(making.session())

    async def write_and_look(seq: int) -> bool:
        await store.put_completion(making.completion(seq=seq))
        return seq in {c.seq for c in await store.completions("s")}

    assert all(await asyncio.gather(*(write_and_look(seq) for seq in range(40))))


async def test_a_refused_write_fails_alone(store: Store) -> None:
    await store.put_session(making.session())
    await store.put_completion(making.completion(seq=0))
    writes = [store.put_completion(making.completion(seq=seq)) for seq in range(1, 20)]
    writes.insert(7, store.put_completion(making.completion(seq=0, tokens=9)))
    writes.insert(3, store.put_session(making.session(task_id="other")))
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [i for i, outcome in enumerate(outcomes) if isinstance(outcome, StoreConflict)] == [3, 8]
    assert sum(outcome is None for outcome in outcomes) == 19
    assert len(await store.completions("s")) == 20


async def test_a_write_no_column_can_hold_fails_alone(store: Store) -> None:
    await store.put_session(making.session())
    outcomes = await asyncio.gather(
        store.put_completion(making.completion(seq=0)),
        store.put_completion(making.completion(seq=2**70, tools=making.large_tools(1))),
        store.put_completion(making.completion(seq=1)),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), OverflowError, type(None)]
    assert [c.seq for c in await store.completions("s")] == [0, 1]


async def test_writes_keep_the_order_of_their_calls(store: Store) -> None:
    await asyncio.gather(
        store.put_session(making.session()),
        store.put_completion(making.completion()),
        store.finish_session(making.session(state="COMPLETED"), making.result()),
    )
    assert len(await store.completions("s")) == 1
    assert len(await store.results()) == 1


async def test_a_cancelled_caller_loses_no_write_and_disturbs_no_other(store: Store) -> None:
    await store.put_session(making.session())
    calls = [asyncio.create_task(store.put_completion(making.completion(seq=seq))) for seq in range(40)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(o, asyncio.CancelledError) for o in outcomes] == [True, False] * 20
    await store.put_completion(making.completion(seq=40))
    stored = await store.completions("s")
    assert len(stored) == 41
    assert all(making.same(c, making.completion(seq=c.seq)) for c in stored)


async def test_close_finishes_what_is_queued(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    await store.put_session(making.session())
    calls = [asyncio.create_task(store.put_completion(making.completion(seq=seq))) for seq in range(30)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*calls)
    await store.close()  # a second time does nothing
    assert [p.name for p in tmp_path.iterdir()] == ["polar.db"]
    for late in (store.put_session(making.session()), store.sessions()):
        with pytest.raises(StoreFailure, match="not open"):
            await late
    reader = SQLiteStore(tmp_path / "polar.db", read_only=True)
    await reader.open()
    assert len(await reader.completions("s")) == 30
    await reader.close()


def test_a_loop_that_ends_without_close_loses_nothing_told(tmp_path: Path) -> None:
    async def leave() -> None:
        store = SQLiteStore(tmp_path / "polar.db")
        await store.open()
        await store.put_session(making.session())

    async def look() -> int:
        reader = SQLiteStore(tmp_path / "polar.db", read_only=True)
        await reader.open()
        try:
            return len(await reader.sessions())
        finally:
            await reader.close()

    asyncio.run(leave())
    assert asyncio.run(look()) == 1


async def test_a_damaged_page_is_one_line_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    store = SQLiteStore(path)
    await store.open()
    await store.put_session(making.session())
    for seq in range(200):
        await store.put_completion(making.completion(seq=seq))
    await store.close()
    with sqlite3.connect(path) as db:
        roots = db.execute("SELECT rootpage FROM sqlite_schema WHERE tbl_name IN ('sessions', 'completions')")
        size, pages = db.execute("PRAGMA page_size").fetchone()[0], [root for (root,) in roots]
    data = bytearray(path.read_bytes())
    for page in pages:
        data[(page - 1) * size : page * size] = b"\xff" * size
    path.write_bytes(data)
    store = SQLiteStore(path)
    await store.open()
    with pytest.raises(StoreFailure, match="damaged") as caught:
        await store.put_session(making.session("t"))
    assert "\n" not in str(caught.value)
    with pytest.raises(PolarError, match="damaged"):
        await store.completions("s")
    await store.close()
