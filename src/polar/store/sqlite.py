"""The embedded store: one SQLite file, so that one process on one machine needs no server to lose nothing.

Write-ahead log with ``synchronous=FULL``: a commit is on disk when it returns. Writes go through one thread
in groups (``writer``), reads through another with a read-only connection; a read sees every write that was
awaited before it began. Other processes may read the file at any time (``read_only``), one may write it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import TypeVar

from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.task import TaskRequest
from polar.store import rules
from polar.store.base import SessionRecord, StoreFailure
from polar.store.codec import CompletionReader, CompletionRow, dumps, encode_completion, encode_result, loads
from polar.store.lock import FileLock
from polar.store.migrations import check, migrate
from polar.store.writer import Apply, GroupWriter

T = TypeVar("T")

BUSY_SECONDS = 10.0
"""How long to wait for another program (a backup, the sqlite3 shell) that holds the file."""


class SQLiteStore:
    """Tasks, sessions, completions and results in the file ``path``. Opened once, on one event loop.

    What a write keeps is the object as it is when the write is called; changes after that are not seen.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._lock = FileLock(self.path)
        self._writer: GroupWriter | None = None
        self._reads: sqlite3.Connection | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polar-store-reader")

    async def open(self) -> None:
        """Create or migrate the database; with ``read_only``, only see that it can be read."""
        loop = asyncio.get_running_loop()
        writes, self._reads = await loop.run_in_executor(self._reader, self._connect)
        if writes is not None:
            self._writer = GroupWriter(writes, partial(_failure, self.path))

    async def close(self) -> None:
        """Finish what is queued, then let go. Safe to call twice."""
        writer, self._writer = self._writer, None
        reads, self._reads = self._reads, None
        if reads is not None:
            # Before the writer: whoever closes last tidies the log into the file, and this one may not.
            await asyncio.get_running_loop().run_in_executor(self._reader, reads.close)
        if writer is not None:
            await writer.close()
        self._lock.release()
        self._reader.shutdown(wait=False)

    async def put_task(self, task: TaskRequest) -> None:
        await self._write(partial(rules.put_task, task=task, body=dumps(task)))

    async def put_session(self, session: SessionRecord) -> None:
        await self._write(partial(rules.put_session, session=copy(session), body=dumps(session)))

    async def put_completion(self, completion: Completion) -> None:
        row, shared = encode_completion(completion)
        await self._write(partial(rules.put_completion, completion=copy(completion), row=row, shared=shared))

    async def finish_session(self, session: SessionRecord, result: SessionResult) -> None:
        said = (session.session_id, session.task_id, session.attempt, session.state)
        if session.state not in TERMINAL_STATES:
            raise ValueError(f"session {session.session_id} can't be finished as {session.state}")
        if said != (result.session_id, result.task_id, result.attempt, result.status):
            raise ValueError(f"session {session.session_id}: the record and its result do not agree")
        write = partial(
            rules.finish_session,
            session=copy(session),
            body=dumps(session),
            result=copy(result),
            result_body=encode_result(result),
        )
        await self._write(write)

    async def task(self, task_id: str) -> TaskRequest | None:
        found = await self._objects(TaskRequest, "SELECT body FROM tasks WHERE task_id = ?", task_id)
        return found[0] if found else None

    async def tasks(self) -> list[TaskRequest]:
        return await self._objects(TaskRequest, "SELECT body FROM tasks ORDER BY id")

    async def session(self, session_id: str) -> SessionRecord | None:
        found = await self._objects(SessionRecord, "SELECT body FROM sessions WHERE session_id = ?", session_id)
        return found[0] if found else None

    async def sessions(self, task_id: str | None = None) -> list[SessionRecord]:
        if task_id is not None:
            query = "SELECT body FROM sessions WHERE task_id = ? ORDER BY sample_index, id"
            return await self._objects(SessionRecord, query, task_id)
        # Sessions of no stored task (bare captures) come last.
        query = (
            "SELECT s.body FROM sessions s LEFT JOIN tasks t ON t.task_id = s.task_id "
            "ORDER BY t.id IS NULL, t.id, s.task_id, s.sample_index, s.id"
        )
        return await self._objects(SessionRecord, query)

    async def results(self, task_id: str | None = None) -> list[SessionResult]:
        if task_id is None:
            return await self._objects(SessionResult, "SELECT body FROM results ORDER BY id")
        query = "SELECT body FROM results WHERE task_id = ? ORDER BY id"
        return await self._objects(SessionResult, query, task_id)

    async def completions(self, session_id: str, attempt: int | None = None) -> list[Completion]:
        return await self._read(lambda db: _completions(db, session_id, attempt))

    async def _write(self, apply: Apply) -> None:
        if self._writer is None:
            if self.read_only:
                raise UsageError(f"{self.path} was opened for reading only")
            raise StoreFailure(f"the store {self.path} is not open")
        await self._writer.submit(apply)

    async def _read(self, read: Callable[[sqlite3.Connection], T]) -> T:
        db = self._reads
        if db is None:
            raise StoreFailure(f"the store {self.path} is not open")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reader, _snapshot, db, read)
        except sqlite3.Error as error:
            raise _failure(self.path, error) from error

    async def _objects(self, kind: type[T], query: str, *args: object) -> list[T]:
        return await self._read(lambda db: [loads(body, kind) for (body,) in db.execute(query, args).fetchall()])

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


def _completions(db: sqlite3.Connection, session_id: str, attempt: int | None) -> list[Completion]:
    def lookup(digest: bytes) -> bytes:
        data: bytes = db.execute("SELECT data FROM contents WHERE digest = ?", (digest,)).fetchone()[0]
        return data

    reader = CompletionReader(lookup)
    rows = db.execute(
        "SELECT completion_id, c.attempt, seq, head, messages, tools, prompt, prompt_ref, response, logprobs "
        "FROM sessions s JOIN completions c ON c.session = s.id AND c.attempt = coalesce(?, s.attempt) "
        "WHERE s.session_id = ? ORDER BY seq",
        (attempt, session_id),
    ).fetchall()
    return [reader.decode(name, session_id, number, seq, CompletionRow(*row)) for name, number, seq, *row in rows]


def _snapshot(db: sqlite3.Connection, read: Callable[[sqlite3.Connection], T]) -> T:
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
    except BaseException:
        db.close()
        raise
    return db


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
