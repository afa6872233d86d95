"""The store: what must survive. One small interface, several databases behind it.

Every ``await`` that writes returns only when the write is on disk (committed and synced). A write that is
repeated with the same content is a no-op, so a caller that does not know whether its write arrived may
simply write again; the same id with other content is an error.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from polar.contract.completion import Completion
from polar.contract.errors import PolarError
from polar.contract.result import SessionResult, SessionState
from polar.contract.task import TaskRequest


class StoreConflict(PolarError):
    """The same id was written again with other content, or the write is under an attempt that is over."""


class NotHeld(StoreConflict):
    """A node writes under an attempt that was never its own. A server writes it to its audit log."""


class StoreFailure(PolarError):
    """The database could not be read or written (disk full, read-only, damaged, closed, away for too long). A write
    that ends so was not kept (of a database server that is away, nobody can know), and may be repeated; everything
    that was awaited before it is still there."""


class SessionRecord(msgspec.Struct, kw_only=True):
    """A session as the store knows it: the newest attempt, and where it stands. Times are epoch seconds."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int = 1
    state: SessionState = "REGISTERED"
    created_at: float
    updated_at: float
    error: str | None = None
    metadata: dict[str, Any] = {}


class Store(Protocol):
    """Tasks, sessions, completions and results.

    Any of these may raise StoreFailure, a write to a store that was opened read-only UsageError. A caller that
    is cancelled while it waits for a write has still made that write.
    """

    async def open(self) -> None:
        """Create or migrate the database.

        Raises:
            UsageError: it can't be opened, or was written by a newer Polar.
        """
        ...

    async def close(self) -> None:
        """Finish what is queued, then let go."""
        ...

    async def put_task(self, task: TaskRequest) -> None:
        """Keep a task.

        Raises:
            StoreConflict: the id exists with another body.
        """
        ...

    async def task(self, task_id: str) -> TaskRequest | None: ...

    async def tasks(self) -> list[TaskRequest]:
        """All tasks, oldest first."""
        ...

    async def put_session(self, session: SessionRecord) -> None:
        """Keep a session, or move it on. A session whose stored attempt ended (terminal state) takes only a
        higher attempt; a lower attempt is refused. The very record that is stored may always be written again.

        Raises:
            StoreConflict: the write is under an attempt that is over, or moves the session to another task
                or sample.
        """
        ...

    async def session(self, session_id: str) -> SessionRecord | None: ...

    async def sessions(self, task_id: str | None = None) -> list[SessionRecord]:
        """All sessions, of one task if named, in order of task and sample."""
        ...

    async def put_completion(self, completion: Completion) -> None:
        """Keep a captured call. Its session must be stored, at this attempt and not ended, unless the very same
        completion is stored already.

        Raises:
            StoreConflict: the id, or the place ``(session_id, attempt, seq)``, has another completion; its base is
                not stored in this attempt; or the session is unknown, ended, or at another attempt.
        """
        ...

    async def completions(self, session_id: str, attempt: int | None = None) -> list[Completion]:
        """A session's calls in order of ``seq``; of its newest attempt when none is named."""
        ...

    async def finish_session(self, session: SessionRecord, result: SessionResult, *, stored: bool = False) -> None:
        """A terminal state and its result, in one transaction. The result is kept without its traces, which
        are built afresh from the completions.

        Args:
            stored: the session must be there already, so that one that is forgotten meanwhile stays forgotten.

        Raises:
            StoreConflict: the attempt is over and this is not the very result it ended with; or the session is
                not there, but must be.
            ValueError: the state is not terminal, or session and result speak of different things.
        """
        ...

    async def forget_session(self, session_id: str) -> int:
        """Drop a session of no task, which nothing may write to any more, with all that is its own; how many calls
        that were. One that is not stored is forgotten already.

        Raises:
            StoreConflict: it is of a task.
        """
        ...

    async def result(self, session_id: str, attempt: int) -> SessionResult | None:
        """What an attempt ended with, without traces; ``None``: it has not ended so."""
        ...

    async def results(self, task_id: str | None = None) -> list[SessionResult]:
        """Results in the order they were stored, without traces: one for every attempt that was finished."""
        ...
