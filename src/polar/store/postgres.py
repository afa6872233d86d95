"""The ledger in PostgreSQL, for several rollout servers over one truth, or one that shall outlive its machine.

Whoever writes locks ``polar.writing`` before it looks at anything, so groups of all servers follow one another: what
a rule has read stays true, cursors are given out in the order of commits, and no session is given out twice. They are
SERIALIZABLE on top of it, so another program's writes can't come in between either. A database that goes away is
waited for (``PATIENCE``), and a group whose commit was under way is asked after by its transaction id: it is
repeated only if it was not committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.pq import TransactionStatus

from polar.contract.errors import UsageError
from polar.store.base import StoreFailure
from polar.store.connection import Args, Read, Recovery, T
from polar.store.database import DatabaseStore
from polar.store.migrations import check_postgres, migrate_postgres
from polar.store.writer import GroupWriter

PATIENCE = 60.0
"""Seconds for which writes and reads wait for a database that is away, before they fail."""

CONFLICTS = 20
"""How often a group is run again because of other programs' writes, before it fails."""

OLDEST = 130_000
"""The first version that can be asked what has become of a transaction."""

_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    # A server, or a client, whose machine is gone must not be waited for (or keep its lock) for hours.
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}

_SETTINGS = (
    "SET search_path = polar",
    "SET lock_timeout = 0",
    "SET idle_in_transaction_session_timeout = '15s'",
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 2",
    "SET tcp_keepalives_count = 3",
    # A commit is on disk when it returns, whatever the server's default; stricter ones stay.
    "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'",
)

_BEGIN = b"""
    BEGIN ISOLATION LEVEL SERIALIZABLE;
    LOCK TABLE writing IN EXCLUSIVE MODE;
    SELECT pg_current_xact_id()::text"""


class PostgresStore(DatabaseStore):
    """A ledger in the schema ``polar`` of a PostgreSQL database.

    Args:
        url: ``postgresql://user:password@host:port/database``, as libpq takes it.

    Raises:
        UsageError: the URL is none.
    """

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        try:
            parts = conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as error:
            raise UsageError(f"--store is no PostgreSQL URL: {_line(error)}") from None
        where = f"{parts.get('host') or 'localhost'}:{parts.get('port') or 5432}"
        super().__init__(f"postgresql://{where}/{parts.get('dbname') or ''}", read_only=read_only)
        self._reads = _Connection(url, self.name)
        self._writes = _Connection(url, self.name)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polar-store-reader")
        self._open = False

    async def open(self) -> None:
        """Connect, and create or migrate the tables; with ``read_only``, only see that they can be read."""
        await asyncio.get_running_loop().run_in_executor(self._reader, self._connect)
        self._open = True
        if not self.read_only:
            self._writer = GroupWriter(self._writes)

    async def close(self) -> None:
        """Finish what is queued, then let go. Safe to call twice."""
        writer, self._writer = self._writer, None
        if self._open:
            self._open = False
            await asyncio.get_running_loop().run_in_executor(self._reader, self._reads.close)
        if writer is not None:
            await writer.close()
        self._reader.shutdown(wait=False)

    async def _read(self, read: Read[T]) -> T:
        if not self._open:
            raise StoreFailure(f"the store {self.name} is not open")
        return await asyncio.get_running_loop().run_in_executor(self._reader, self._reads.ask, read)

    def _connect(self) -> None:
        """On a thread: both connections, and the tables as this Polar needs them."""
        try:
            self._reads.connect()
            if self._reads.server_version < OLDEST:
                raise UsageError(f"store {self.name}: Polar needs PostgreSQL {OLDEST // 10_000} or later")
            if self.read_only:
                check_postgres(self._reads, self.name)
                return
            self._writes.connect()
            with self._writes.transaction():
                migrate_postgres(self._writes, self.name)
        except BaseException as error:
            self._reads.close()
            self._writes.close()
            if isinstance(error, psycopg.Error):
                raise UsageError(_advice(self.name, error)) from error
            raise


class _Uncommitted(psycopg.OperationalError):
    """The connection was lost in a commit, and is back: the commit had not come through."""


class _Connection:
    """A connection that comes back after it was lost; ``Connection`` and ``Writes`` of ``polar.store.connection``."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url
        self._name = name
        self._db: psycopg.Connection | None = None
        self._away_since: float | None = None
        self._transaction = ""

    def connect(self) -> None:
        """Connect (again).

        Raises:
            psycopg.Error: it can't be had now.
        """
        self.close()
        self._db = psycopg.connect(self._url, autocommit=True, application_name="polar", **_CONNECT)
        for setting in _SETTINGS:
            self.execute(setting)
        self._away_since = None

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    @property
    def server_version(self) -> int:
        """150004 for 15.4."""
        return self._live.info.server_version

    def execute(self, sql: str, args: Args = (), /) -> psycopg.Cursor:
        return self._live.execute(_translated(sql), args, binary=True)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        with self._live.transaction():
            yield

    def ask(self, read: Read[T]) -> T:
        """Run a read, waiting for a database that is away."""
        while True:
            try:
                self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                try:
                    return read(self)
                finally:
                    self.rollback()
            except psycopg.Error as error:
                if not (self._is_lost(error) and self._come_back()):
                    raise self.explain(error) from error

    # ---- as GroupWriter drives it ------------------------------------------------------------------------

    def begin(self) -> None:
        # Not prepared, for it is three statements. The lock is taken before the first of them looks at the data.
        cursor = self._live.execute(_BEGIN, prepare=False)
        while cursor.nextset():
            pass
        row = cursor.fetchone()
        assert row is not None
        self._transaction = row[0]

    def commit(self) -> None:
        try:
            self.execute("COMMIT")
        except psycopg.Error as error:
            if not (self._is_lost(error) and self._come_back()):
                raise
            if not self._was_committed():
                raise _Uncommitted(_line(error)) from error

    def rollback(self) -> None:
        db = self._db
        if db is not None and db.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            with contextlib.suppress(psycopg.Error):
                db.execute("ROLLBACK")

    def survives(self, error: Exception) -> bool:
        return not (self._is_lost(error) or _is_conflict(error))

    def recover(self, error: Exception, tries: int, writes: int) -> Recovery:
        if isinstance(error, _Uncommitted):
            return "again"
        if self._is_lost(error):
            return "again" if self._come_back() else "failed"
        if _is_conflict(error) and tries < CONFLICTS:
            time.sleep(random.random() * min(0.01 * 2**tries, 1.0))
            return "again"
        return "apart" if isinstance(error, psycopg.errors.DiskFull) and writes > 1 else "failed"

    def explain(self, error: Exception) -> Exception:
        if isinstance(error, psycopg.errors.NumericValueOutOfRange):
            return OverflowError(_line(error))
        return StoreFailure(_advice(self._name, error)) if isinstance(error, psycopg.Error) else error

    # ---- losing it, and finding it again -----------------------------------------------------------------

    @property
    def _live(self) -> psycopg.Connection:
        if self._db is None:
            raise psycopg.OperationalError("not connected")
        return self._db

    def _is_lost(self, error: Exception) -> bool:
        """Whether an error says that the connection is no more."""
        fatal = isinstance(error, psycopg.Error) and error.diag.severity_nonlocalized in ("FATAL", "PANIC")
        return fatal or self._db is None or self._db.closed

    def _come_back(self) -> bool:
        """Connect again, waiting until ``PATIENCE`` has passed since the connection was lost."""
        self._away_since = self._away_since or time.monotonic()
        until = self._away_since + PATIENCE
        pause = 0.02
        while True:
            try:
                self.connect()
                return True
            except psycopg.Error:
                if time.monotonic() >= until:
                    return False
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _was_committed(self) -> bool:
        """What has become of the transaction whose commit was not answered."""
        while True:
            try:
                row = self.execute("SELECT pg_xact_status(?::text::xid8)", (self._transaction,)).fetchone()
            except psycopg.Error as error:
                if self._is_lost(error) and self._come_back():
                    continue
                return False  # a database that never heard of it: it was restored, or a standby took over
            if row is None or row[0] != "in progress":
                return row is not None and row[0] == "committed"
            time.sleep(0.02)  # the server has not noticed yet that we were cut off


@lru_cache(maxsize=512)
def _translated(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, psycopg.errors.SerializationFailure | psycopg.errors.DeadlockDetected)


def _line(error: Exception) -> str:
    """The error's first line, which says what is wrong; further ones are hints and contexts."""
    said = str(error).strip().split("\n")[0]
    return said.rsplit("FATAL:", 1)[-1].rsplit("failed: ", 1)[-1].strip() or type(error).__name__


def _advice(name: str, error: psycopg.Error) -> str:
    """PostgreSQL's error in one line that says what to do."""
    said, line = str(error), _line(error)
    if "password" in said:
        return f"store {name}: {line}: check user and password in --store, or set PGPASSWORD"
    if "database" in line and "does not exist" in line:
        return f"store {name}: {line}: create it (createdb), or name another one with --store"
    if "role" in line and "does not exist" in line:
        return f"store {name}: {line}: create it (createuser), or name another user with --store"
    if isinstance(error, psycopg.errors.InsufficientPrivilege):
        return f"store {name}: {line}: let its user create a schema (GRANT CREATE ON DATABASE), or take another one"
    if isinstance(error, psycopg.errors.DiskFull):
        return f"store {name}: the server's disk is full; free some space and try again"
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        return f"store {name}: it is read-only; name the primary server with --store"
    if isinstance(error, psycopg.OperationalError):
        return f"store {name} does not answer ({line}): start PostgreSQL there, or check host and port in --store"
    return f"store {name}: {line}"
