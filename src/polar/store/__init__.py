"""What must survive, and where it is kept: ``open_store`` is the way from a user's ``--store`` to a store."""

from __future__ import annotations

from pathlib import Path

from polar.contract.errors import UsageError
from polar.store.base import SessionRecord, Store, StoreConflict, StoreFailure
from polar.store.sqlite import SQLiteStore

__all__ = ["SQLiteStore", "SessionRecord", "Store", "StoreConflict", "StoreFailure", "open_store"]


def open_store(url: str, *, read_only: bool = False) -> Store:
    """The store at ``url``; nothing is touched on disk until its ``open`` is awaited.

    Args:
        url: ``sqlite:///relative/path``, ``sqlite:////absolute/path``, or just the path of the file.
        read_only: for looking at a store that another process may be writing. Writes are refused.

    Raises:
        UsageError: the URL is not one of these.
    """
    return SQLiteStore(_sqlite_path(url), read_only=read_only)


def _sqlite_path(url: str) -> Path:
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme in ("postgresql", "postgres"):
        raise UsageError(
            "this version of Polar keeps sessions in SQLite, PostgreSQL is not supported: use --store sqlite:///PATH"
        )
    elif scheme != "sqlite":
        raise UsageError(f"unknown store {scheme!r}: use --store sqlite:///PATH, or the path of the file")
    elif not rest.startswith("/") or "?" in rest:
        raise UsageError(f"{url!r} is no store: write sqlite:///relative/path or sqlite:////absolute/path")
    else:
        path = rest[1:]
    if path in ("", "/", ":memory:") or "\0" in path:
        raise UsageError(f"{url!r} names no file: a store must be a file, such as sqlite:///polar.db")
    return Path(path).expanduser()
