"""Opening: which URLs there are, who may open what, and what it says when it can't."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.contract.errors import UsageError
from polar.store import SQLiteStore, Store, open_store
from polar.store.migrations import STEPS, migrate
from tests.store import making

Writing = Callable[..., object]


async def _refused(store: Store, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        await store.open()
    assert "\n" not in str(caught.value)
    await store.close()


def _sqlite(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        for statement in statements:
            db.execute(statement)


# URLs


async def test_a_url_or_a_path_is_a_file_and_missing_folders_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (f"sqlite:///{tmp_path}/a/b/polar.db", "sqlite:///c/polar.db", "d/polar.db", str(tmp_path / "e.db")):
        store = open_store(url)
        await store.open()
        await store.put_session(making.session())
        await store.close()
    found = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == ["a/b/polar.db", "c/polar.db", "d/polar.db", "e.db"]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("postgresql://db:port:9/polar?nonsense=1", "no PostgreSQL URL"),
        ("mysql://db/polar", "unknown store 'mysql'"),
        ("sqlite://polar.db", "sqlite:///relative/path"),
        ("sqlite:///polar.db?mode=ro", "is no store"),
        ("sqlite:///", "names no file"),
        ("sqlite:///:memory:", "must be a file"),
        ("", "names no file"),
    ],
)
def test_any_other_url_is_wrong_usage(url: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        open_store(url)


# Files that are not ours


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello " * 100)
    await _refused(SQLiteStore(path), "is not a database")
    await _refused(SQLiteStore(path, read_only=True), "is not a database")
    assert path.read_text() == "hello " * 100
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("mark", ["PRAGMA user_version = 0", "PRAGMA user_version = 1", "PRAGMA application_id = 7"])
async def test_the_database_of_another_program_is_left_alone(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "other.db"
    _sqlite(path, "CREATE TABLE theirs (a)", mark)
    before = path.read_bytes()
    await _refused(SQLiteStore(path), "another program")
    assert path.read_bytes() == before


async def test_a_path_that_can_not_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    await _refused(SQLiteStore(tmp_path / "file" / "polar.db"), "can't write to .*file")
    (tmp_path / "folder.db").mkdir()
    await _refused(SQLiteStore(tmp_path / "folder.db"), "can't be opened")
    await _refused(SQLiteStore(tmp_path / "missing.db", read_only=True), "there is no store")
    assert not (tmp_path / "missing.db").exists()


# Versions


async def test_a_database_of_a_newer_polar_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    store = SQLiteStore(path)
    await store.open()
    await store.close()
    _sqlite(path, f"PRAGMA user_version = {len(STEPS) + 4}")
    match = f"newer Polar: it has version {len(STEPS) + 4} .* up to version {len(STEPS)}"
    await _refused(SQLiteStore(path), match)
    await _refused(SQLiteStore(path, read_only=True), match)


def test_an_older_database_is_brought_forward_step_by_step(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    steps = [("CREATE TABLE a (x)",), ("INSERT INTO a VALUES (1)",), ("UPDATE a SET x = x + 1", "CREATE TABLE b (y)")]
    for known in (1, 3, 3):
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
            migrate(db, path, steps[:known])
            assert db.execute("PRAGMA user_version").fetchone() == (known,)
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT x FROM a").fetchall() == [(2,)]


def test_a_step_that_fails_leaves_the_step_before_it(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    broken = [("CREATE TABLE a (x)",), ("CREATE TABLE b (y)", "no statement")]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        with pytest.raises(sqlite3.OperationalError):
            migrate(db, path, broken)
        tables = db.execute("SELECT name FROM sqlite_schema").fetchall()
        assert (tables, db.execute("PRAGMA user_version").fetchone()) == ([("a",)], (1,))


async def test_an_older_database_can_not_be_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "polar.db"
    store = SQLiteStore(path)
    await store.open()
    await store.close()
    newer = (*STEPS, ("CREATE TABLE more (x)",))
    monkeypatch.setattr("polar.store.migrations.check.__defaults__", (newer,))
    await _refused(SQLiteStore(path, read_only=True), f"has version {len(STEPS)} .* needs version {len(newer)}")


# One that writes, any number that read


async def test_a_second_writing_process_is_told_who_writes(tmp_path: Path, writing: Writing) -> None:
    path = tmp_path / "polar.db"
    process = writing(path, "s", 5)
    await _refused(SQLiteStore(path), f"being written by process {process.pid} on ")
    told = process.read(5) + process.kill()
    store = SQLiteStore(path)
    await store.open()  # SIGKILL let go of it
    assert {c.completion_id for c in await store.completions("s")} == set(told)
    await store.close()


async def test_a_second_writing_store_of_one_process_is_refused(sqlite_store: Store, tmp_path: Path) -> None:
    await _refused(SQLiteStore(tmp_path / "polar.db"), "being written by process")
    await sqlite_store.put_session(making.session())
    assert len(await sqlite_store.sessions()) == 1


async def test_readers_follow_a_live_writer(tmp_path: Path, writing: Writing) -> None:
    path = tmp_path / "polar.db"
    process = writing(path, "s", 300)
    told: list[str] = []
    reader = open_store(f"sqlite:///{path}", read_only=True)
    await reader.open()
    for _ in range(10):
        told += process.read(30)
        assert set(told) <= {c.completion_id for c in await reader.completions("s")}
    await reader.close()


async def test_a_read_only_store_refuses_to_write(sqlite_store: Store, tmp_path: Path) -> None:
    await sqlite_store.put_session(making.session())
    reader = SQLiteStore(tmp_path / "polar.db", read_only=True)
    await reader.open()
    for write in (reader.put_task(making.task()), reader.put_completion(making.completion())):
        with pytest.raises(UsageError, match="opened for reading only"):
            await write
    assert await reader.sessions() == [making.session()]
    await reader.close()
