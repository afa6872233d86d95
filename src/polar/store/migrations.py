"""How a database written by an earlier Polar becomes one of today (``schema`` has the steps).

The version is kept in the database itself (``PRAGMA user_version``; in PostgreSQL a table), and each step is one
transaction together with its version number, so a process killed in the middle leaves the database at a step, never
between two.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from polar.contract.errors import UsageError
from polar.store.connection import Connection
from polar.store.schema import STEPS, Step, run_step

APPLICATION_ID = 0x504F4C52  # "POLR": tells our files from other programs' SQLite databases

_OLDER = (
    "{store} has version {version} of the store, this Polar needs version {needed}: "
    "open it once for writing (polar run ... --store ...), which brings it up to date"
)
_NEWER = (
    "{store} was written by a newer Polar: it has version {version} of the store, this Polar knows "
    "up to version {known}; upgrade Polar, or name another store with --store"
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
            run_step(db, step, "sqlite")
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
        raise UsageError(_OLDER.format(store=path, version=version, needed=len(steps)))


def _version(db: sqlite3.Connection, path: Path, newest: int) -> int:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    owner = int(db.execute("PRAGMA application_id").fetchone()[0])
    if owner not in (0, APPLICATION_ID) or (version and owner != APPLICATION_ID):
        raise UsageError(f"{path} is the database of another program: name another file with --store")
    if version > newest:
        raise UsageError(_NEWER.format(store=path, version=version, known=newest))
    return version


def migrate_postgres(db: Connection, name: str, steps: Sequence[Step] = STEPS) -> None:
    """Bring a database to the newest version, inside a transaction. Its tables are in the schema ``polar``.

    Raises:
        UsageError: another program's schema, or one of a newer Polar.
    """
    db.execute("SELECT pg_advisory_xact_lock(?)", (APPLICATION_ID,))  # two servers may start at once
    if db.execute("SELECT to_regnamespace('polar')").fetchone()[0] is None:
        db.execute("CREATE SCHEMA polar")
        db.execute("CREATE TABLE polar.version (version BIGINT NOT NULL)")
        db.execute("INSERT INTO polar.version VALUES (0)")
    version = _postgres_version(db, name, len(steps))
    for step in steps[version:]:
        run_step(db, step, "postgresql")
    if version < len(steps):
        db.execute("UPDATE version SET version = ?", (len(steps),))


def check_postgres(db: Connection, name: str, steps: Sequence[Step] = STEPS) -> None:
    """See that a database can be read as it is.

    Raises:
        UsageError: there is no store in it, or one of a newer or an older Polar.
    """
    version = _postgres_version(db, name, len(steps))
    if version < len(steps):
        raise UsageError(_OLDER.format(store=name, version=version, needed=len(steps)))


def _postgres_version(db: Connection, name: str, newest: int) -> int:
    if db.execute("SELECT to_regclass('polar.version')").fetchone()[0] is None:
        raise UsageError(f"{name} is no Polar store, or one that has not been set up yet: check the database's name")
    version = int(db.execute("SELECT version FROM polar.version").fetchone()[0])
    if version > newest:
        raise UsageError(_NEWER.format(store=name, version=version, known=newest))
    return version
