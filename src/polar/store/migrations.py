"""The schema, and how a database written by an earlier Polar becomes one of today.

The version is kept in the file itself (``PRAGMA user_version``), and each step is one transaction together
with its version number, so a process killed in the middle leaves the database at a step, never between two.
A step that has been released is never changed: a new one is added behind it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from polar.contract.errors import UsageError

APPLICATION_ID = 0x504F4C52  # "POLR": tells our files from other programs' SQLite databases

Step = tuple[str, ...]

STEPS: tuple[Step, ...] = (
    (
        "CREATE TABLE tasks (id INTEGER PRIMARY KEY, task_id TEXT NOT NULL UNIQUE, body BLOB NOT NULL)",
        # The columns beside the body are what queries and rules need; the body is the whole record.
        """CREATE TABLE sessions (
            id INTEGER PRIMARY KEY, session_id TEXT NOT NULL UNIQUE, task_id TEXT NOT NULL,
            sample_index INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
            body BLOB NOT NULL)""",
        "CREATE INDEX sessions_by_task ON sessions (task_id, sample_index)",
        """CREATE TABLE completions (
            id INTEGER PRIMARY KEY, completion_id TEXT NOT NULL UNIQUE,
            session INTEGER NOT NULL REFERENCES sessions (id), attempt INTEGER NOT NULL, seq INTEGER NOT NULL,
            head BLOB NOT NULL, messages BLOB NOT NULL, tools BLOB, prompt BLOB, prompt_ref BLOB,
            response BLOB NOT NULL, logprobs BLOB NOT NULL, UNIQUE (session, attempt, seq))""",
        # Large pieces that come back call after call and sample after sample, once each, by their digest.
        "CREATE TABLE contents (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, data BLOB NOT NULL)",
        """CREATE TABLE results (
            id INTEGER PRIMARY KEY, session_id TEXT NOT NULL, task_id TEXT NOT NULL, attempt INTEGER NOT NULL,
            body BLOB NOT NULL, UNIQUE (session_id, attempt))""",
        "CREATE INDEX results_by_task ON results (task_id)",
    ),
)


def migrate(db: sqlite3.Connection, path: Path, steps: Sequence[Step] = STEPS) -> None:
    """Bring the database to the newest version. ``db`` is in autocommit mode (``isolation_level=None``).

    Raises:
        UsageError: another program's database, or one of a newer Polar.
    """
    version = _version(db, path, len(steps))
    if version == 0:
        if db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            raise UsageError(f"{path} is the database of another program: name another file with --store")
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for number, step in enumerate(steps[version:], start=version + 1):
        db.execute("BEGIN IMMEDIATE")
        try:
            for statement in step:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def check(db: sqlite3.Connection, path: Path, steps: Sequence[Step] = STEPS) -> None:
    """See that the database can be read as it is, without changing it.

    Raises:
        UsageError: another program's database, or one of a newer or an older Polar.
    """
    version = _version(db, path, len(steps))
    if version == 0:
        raise UsageError(f"{path} is no Polar store, or one that has not been set up yet: check the path")
    if version < len(steps):
        raise UsageError(
            f"{path} has version {version} of the store, this Polar needs version {len(steps)}: "
            "open it once for writing (polar run ... --store ...), which brings it up to date"
        )


def _version(db: sqlite3.Connection, path: Path, newest: int) -> int:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    owner = int(db.execute("PRAGMA application_id").fetchone()[0])
    if owner not in (0, APPLICATION_ID) or (version and owner != APPLICATION_ID):
        raise UsageError(f"{path} is the database of another program: name another file with --store")
    if version > newest:
        raise UsageError(
            f"{path} was written by a newer Polar: it has version {version} of the store, this Polar knows "
            f"up to version {newest}; upgrade Polar, or name another file with --store"
        )
    return version
