"""What must survive, and where it is kept: ``open_store`` is the way from a user's ``--store`` to a store."""

from __future__ import annotations

from pathlib import Path

from polar.contract.errors import MissingExtra, UsageError
from polar.store.base import SessionRecord, Store, StoreConflict, StoreFailure
from polar.store.journal import Journal
from polar.store.ledger import Ledger
from polar.store.sqlite import SQLiteJournal, SQLiteStore

__all__ = [
    "Journal",
    "Ledger",
    "SQLiteJournal",
    "SQLiteStore",
    "SessionRecord",
    "Store",
    "StoreConflict",
    "StoreFailure",
    "open_store",
]


def open_store(url: str, *, read_only: bool = False) -> Ledger:
    """The store at ``url``; nothing is touched until its ``open`` is awaited.

    Args:
        url: ``sqlite:///relative/path``, ``sqlite:////absolute/path``, or just the path of the file;
            ``postgresql://user@host/database``.
        read_only: for looking at a store that another process may be writing. Writes are refused.

    Raises:
        UsageError: the URL is not one of these.
        MissingExtra: PostgreSQL is asked for, and its driver is not installed.
    """
    if url.startswith(("postgresql://", "postgres://")):
        return _postgres(url, read_only)
    return SQLiteStore(_sqlite_path(url), read_only=read_only)


def _postgres(url: str, read_only: bool) -> Ledger:
    try:
        import psycopg  # noqa: F401
    except ImportError:
        raise MissingExtra("a store in PostgreSQL", "postgres") from None
    from polar.store.postgres import PostgresStore

    return PostgresStore(url, read_only=read_only)


def _sqlite_path(url: str) -> Path:
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme != "sqlite":
        raise UsageError(f"unknown store {scheme!r}: use --store sqlite:///PATH or postgresql://HOST/DATABASE")
    elif not rest.startswith("/") or "?" in rest:
        raise UsageError(f"{url!r} is no store: write sqlite:///relative/path or sqlite:////absolute/path")
    else:
        path = rest[1:]
    if path in ("", "/", ":memory:") or "\0" in path:
        raise UsageError(f"{url!r} names no file: a store must be a file, such as sqlite:///polar.db")
    return Path(path).expanduser()
