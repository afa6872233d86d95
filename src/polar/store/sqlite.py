"""The embedded store: one SQLite file, so that one process on one machine needs no server to lose nothing.

Write-ahead log with ``synchronous=FULL``: a commit is on disk when it returns. Writes go through one thread
in groups (``writer``), reads through another with a read-only connection; a read sees every write that was
awaited before it began. Other processes may read the file at any time (``read_only``), one may write it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path

from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.contract.result import SessionResult
from polar.store import endings, outbox, queries, retention
from polar.store.base import SessionRecord, StoreFailure
from polar.store.codec import dumps, encode_completion
from polar.store.connection import Args, Read, Recovery, T
from polar.store.database import DatabaseStore, require_agreement
from polar.store.ledger import Purged
from polar.store.lock import FileLock
from polar.store.migrations import check, migrate
from polar.store.writer import GroupWriter

log = logging.getLogger("polar.store")

BUSY_SECONDS = 10.0
"""How long to wait for another program (a backup, the sqlite3 shell) that holds the file."""
WIPE_SECONDS = 1.0
"""How long to wait for readers to let go of the log, when what was forgotten shall be gone from it, too: meanwhile
nobody can write. If they don't, it goes the next time."""
WIPE_AFTER = 1.0
"""Seconds after a session was forgotten until it goes from the log: one wipe for all that are forgotten meanwhile."""


class SQLiteStore(DatabaseStore):
    """A ledger in the file ``path``."""

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        super().__init__(str(self.path), read_only=read_only)
        self._lock = FileLock(self.path)
        self._reads: sqlite3.Connection | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polar-store-reader")
        self._unwiped = False
        self._wiping: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Create or migrate the database; with ``read_only``, only see that it can be read."""
        loop = asyncio.get_running_loop()
        writes, self._reads = await loop.run_in_executor(self._reader, self._connect)
        if writes is not None:
            self._writer = GroupWriter(_Writes(writes, self.path))

    async def close(self) -> None:
        """Finish what is queued, then let go. Safe to call twice."""
        self._closing.set()
        if self._wiping is not None:
            await self._wiping
        writer, self._writer = self._writer, None
        reads, self._reads = self._reads, None
        if reads is not None:
            # Before the writer: whoever closes last tidies the log into the file, and this one may not.
            await asyncio.get_running_loop().run_in_executor(self._reader, reads.close)
        if writer is not None:
            await writer.close()
        self._lock.release()
        self._reader.shutdown(wait=False)

    async def purge(self, before: float) -> Purged:
        purged = await super().purge(before)
        await self._wipe()
        return purged

    async def forget_session(self, session_id: str) -> int:
        calls = await super().forget_session(session_id)
        self._wipe_later()
        return calls

    async def forget_there_later(self, session_id: str, node_id: str) -> int:
        calls = await super().forget_there_later(session_id, node_id)
        self._wipe_later()
        return calls

    def _wipe_later(self) -> None:
        self._unwiped = True
        if self._wiping is None or self._wiping.done():
            self._wiping = asyncio.create_task(self._wipe_soon())

    async def _wipe_soon(self) -> None:
        while self._unwiped:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), WIPE_AFTER)
            self._unwiped = False
            try:
                await self._wipe()
            except StoreFailure as error:
                log.error("what was forgotten is still in the log of the store: %s", error)

    async def _wipe(self) -> None:
        """Bring what was deleted to the file, where it is overwritten, and empty the log, which still has it."""
        await asyncio.to_thread(_empty_log, self.path)

    async def _read(self, read: Read[T]) -> T:
        db = self._reads
        if db is None:
            raise StoreFailure(f"the store {self.path} is not open")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, _snapshot, db, read)
        except sqlite3.Error as error:
            raise _failure(self.path, error) from error

    def _connect(self) -> tuple[sqlite3.Connection | None, sqlite3.Connection]:
        """On a thread: the writing connection (if this store writes) and the reading one."""
        if self.read_only:
            return None, _open_for_reading(self.path)
        writes = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            writes = _open_for_writing(self.path)
            return writes, _open_for_reading(self.path)
        except BaseException as error:
            if writes is not None:
                writes.close()
            self._lock.release()
            if isinstance(error, sqlite3.Error):
                raise UsageError(str(_failure(self.path, error))) from error
            if isinstance(error, OSError):
                why = f"{error.strerror}; name another file with --store"
                raise UsageError(f"store {self.path}: can't write to {error.filename or self.path}: {why}") from error
            raise


class SQLiteJournal(SQLiteStore):
    """``polar.store.journal.Journal``: a node's own store, which remembers what it has not handed over yet."""

    async def put_completion(self, completion: Completion) -> None:
        row, shared = encode_completion(completion)
        await self._write(partial(outbox.put_completion, completion=copy(completion), row=row, shared=shared))

    async def finish_session(self, session: SessionRecord, result: SessionResult, *, stored: bool = False) -> None:
        require_agreement(session, result)
        end = endings.ending(result)
        finish = partial(outbox.finish_session, session=copy(session), body=dumps(session), end=end, stored=stored)
        await self._write(finish)

    async def unshipped(self, limit: int) -> list[Completion]:
        return await self._read(partial(queries.unshipped, limit=limit))

    async def shipped(self, completion_ids: Sequence[str]) -> None:
        await self._write(partial(outbox.shipped, completion_ids=list(completion_ids)))

    async def set_aside(self, refused: Mapping[str, str]) -> None:
        await self._write(partial(outbox.set_aside, refused=dict(refused)))

    async def refused(self, session_id: str, attempt: int) -> dict[str, str]:
        return await self._read(partial(queries.refused, session_id=session_id, attempt=attempt))

    async def undelivered(self) -> list[SessionResult]:
        return await self._read(queries.undelivered)

    async def delivered(self, session_id: str, attempt: int) -> None:
        await self._write(partial(outbox.delivered, session_id=session_id, attempt=attempt))

    async def forget_handed_over(self, before: float, held: Collection[str], *, aside: bool) -> Purged:
        purged = []
        for session_id in await self._read(partial(retention.handed_over, before=before, aside=aside)):
            if session_id not in held:
                forget = partial(retention.forget_handed_over, session_id=session_id, before=before, aside=aside)
                purged.append(await self._write(forget))
        await self._write(partial(retention.tidy, before=before))
        await self._wipe()
        return Purged(*map(sum, zip(retention.NOTHING, *purged, strict=True)))

    async def set_result_aside(self, session_id: str, attempt: int, reason: str) -> None:
        aside = partial(outbox.set_result_aside, session_id=session_id, attempt=attempt, reason=reason)
        await self._write(aside)


class _Writes:
    """The writing connection, which is in autocommit mode (``isolation_level=None``)."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self._path = path

    def execute(self, sql: str, args: Args = (), /) -> sqlite3.Cursor:
        return self._db.execute(sql, args)

    def begin(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._db.execute("COMMIT")

    def rollback(self) -> None:
        if self._db.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def survives(self, error: Exception) -> bool:
        return self._db.in_transaction  # else SQLite gave the whole group up

    def recover(self, error: Exception, tries: int, writes: int) -> Recovery:
        full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
        return "apart" if full and writes > 1 else "failed"  # a small one may still fit

    def explain(self, error: Exception) -> Exception:
        return _failure(self._path, error) if isinstance(error, sqlite3.Error) else error

    def close(self) -> None:
        self._db.close()


def _snapshot(db: sqlite3.Connection, read: Read[T]) -> T:
    db.execute("BEGIN")
    try:
        return read(db)
    finally:
        db.execute("ROLLBACK")


def _open_for_writing(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        migrate(db, path)  # first, because it refuses files that are not ours to change
        if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise UsageError(f"{path} is on a file system without shared memory: name a local file with --store")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA secure_delete = ON")  # what is forgotten is overwritten
    except BaseException:
        db.close()
        raise
    return db


def _empty_log(path: Path) -> None:
    """On a thread of its own, with a connection of its own: others go on."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=WIPE_SECONDS, isolation_level=None)) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise _failure(path, error) from error


def _open_for_reading(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise UsageError(f"there is no store at {path}: check the path")
    uri = path.absolute().as_uri() + "?mode=ro"
    try:
        return _connect_for_reading(uri, path)
    except sqlite3.Error as error:
        log = path.with_name(path.name + "-wal")
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CANTOPEN or (log.exists() and log.stat().st_size):
            raise UsageError(str(_failure(path, error))) from error
    # No log, and none can be made: a finished file on read-only media, which nobody can be writing.
    try:
        return _connect_for_reading(uri + "&immutable=1", path)
    except sqlite3.Error as error:
        raise UsageError(str(_failure(path, error))) from error


def _connect_for_reading(uri: str, path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        check(db, path)
    except BaseException:
        db.close()
        raise
    return db


_ADVICE = {
    sqlite3.SQLITE_FULL: "the disk is full; free some space and try again",
    sqlite3.SQLITE_READONLY: "it is read-only; make it writable, or name another file with --store",
    sqlite3.SQLITE_CANTOPEN: "it can't be opened; check its permissions, or copy its folder to a place of your own",
    sqlite3.SQLITE_NOTADB: "it is not a database; name another file with --store",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore it from a copy, or name another file with --store",
    sqlite3.SQLITE_BUSY: "another program holds it locked; end that program and try again",
    sqlite3.SQLITE_IOERR: "the disk reports an error; check the disk, then try again",
}


def _failure(path: Path, error: sqlite3.Error) -> StoreFailure:
    """SQLite's error in one line that says what to do."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return StoreFailure(f"store {path}: {_ADVICE.get(code, str(error))}")
