"""A database of an earlier Polar becomes one of today with all that is in it."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from polar.contract.chat import Message
from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.store import SQLiteStore
from polar.store.codec import dumps, encode_completion, encode_result
from polar.store.migrations import APPLICATION_ID, STEPS, migrate
from tests.store import making

VERSION_1 = """
    CREATE TABLE tasks (id INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL);
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL,
        sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL, body BLOB NOT NULL);
    CREATE INDEX sessions_by_task ON sessions (task_id, sample_index);
    CREATE TABLE completions (
        id INTEGER PRIMARY KEY, completion_id TEXT NOT NULL UNIQUE,
        session INTEGER NOT NULL REFERENCES sessions (id), attempt INTEGER NOT NULL, seq INTEGER NOT NULL,
        head BLOB NOT NULL, messages BLOB NOT NULL, tools BLOB, prompt BLOB, prompt_ref BLOB,
        response BLOB NOT NULL, logprobs BLOB NOT NULL, UNIQUE (session, attempt, seq));
    CREATE TABLE contents (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL);
    CREATE TABLE results (
        id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, task_id TEXT NOT NULL, attempt INTEGER NOT NULL,
        body BLOB NOT NULL, UNIQUE (session_id, attempt));
    CREATE INDEX results_by_task ON results (task_id);
"""


def _version_1(path: Path, completions: list[Completion], result: SessionResult) -> None:
    """Two sessions of a task, one with calls and a result, as the first version of the store kept them."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.executescript(VERSION_1)
        db.execute("INSERT INTO tasks VALUES (1, 'task', ?)", (dumps(making.task()),))
        for key, name, state in ((1, "s", "COMPLETED"), (2, "t", "RUNNING")):
            record = making.session(name, sample_index=key, state=state)
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, 'task', ?, 1, ?, ?)", (key, name, key, state, dumps(record))
            )
        for completion in completions:
            row, shared = encode_completion(completion)
            db.executemany("INSERT OR IGNORE INTO contents (digest, data) VALUES (?, ?)", shared.items())
            values = (completion.completion_id, 1, completion.seq, *row)
            db.execute(f"INSERT INTO completions VALUES (NULL, ?, 1, {', '.join('?' * 9)})", values)
        db.execute("INSERT INTO results VALUES (7, 's', 'task', 1, ?)", (encode_result(result),))
        db.execute("PRAGMA user_version = 1")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")


async def test_a_database_of_version_1_is_taken_over_with_all_that_is_in_it(tmp_path: Path) -> None:
    system = Message(role="system", content="rules " * 2000)
    completions = [
        making.completion(seq=0, messages=(system,), tools=making.large_tools(5), tokens=3000),
        making.completion(seq=1, tools=making.large_tools(5)),
    ]
    result = making.result()
    result.trajectory.metadata["reconstruction"] = {"tokens_trained": 12}
    _version_1(tmp_path / "polar.db", completions, result)

    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    assert await store.tasks() == [making.task()]
    assert [s.session_id for s in await store.sessions("task")] == ["s", "t"]
    assert [making.same(a, b) for a, b in zip(await store.completions("s"), completions, strict=True)] == [True] * 2
    assert [(r.cursor, r.result) for r in await store.results_after(0, 10)] == [(7, result)]
    assert await store.progress() == [("task", "running", 2, 1, 1)]
    assert await store.claim("n", 10, 10.0, 0.0) == []

    # What is shared is known to be, and goes with the task.
    await store.finish_session(making.session("t", sample_index=2, state="ERROR"), making.result("t", status="ERROR"))
    assert [r.cursor for r in await store.results_after(7, 10)] == [8]
    assert await store.purge(100.0) == (1, 2, 2)
    await store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "polar.db")) as db:
        assert db.execute("SELECT count(*) FROM contents").fetchone() == (0,)


async def test_a_database_of_version_3_learns_what_nodes_have_to_forget(tmp_path: Path) -> None:
    path = tmp_path / "polar.db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        migrate(db, path, STEPS[:3])
        db.execute(
            "INSERT INTO sessions (session_id, task_id, sample_index, attempt, state, body, updated_at) "
            "VALUES ('s', 's', 0, 1, 'COMPLETED', ?, 0)",
            (dumps(making.session(task_id="s", state="COMPLETED")),),
        )
    store = SQLiteStore(path)
    await store.open()
    assert [s.session_id for s in await store.sessions()] == ["s"]
    await store.forget_there_later("s", "n")
    assert (await store.sessions(), await store.to_forget()) == ([], [("s", "n")])
    await store.close()
