"""The one place that writes a session's row, so that all that follows from a move happens with every move: its event,
the end of leases that it ends, and what is due when it was the last of its task.
"""

from __future__ import annotations

from typing import NamedTuple

from polar.contract.result import TERMINAL_STATES
from polar.store import events
from polar.store.base import SessionRecord
from polar.store.codec import dumps, loads
from polar.store.connection import Connection

OPEN = "state NOT IN ('COMPLETED', 'ERROR', 'TIMEOUT')"
"""Of a session that has not ended. In these very words, which are those of an index."""


class Stored(NamedTuple):
    """A session with what rules need to know of it.

    ``queued``: it waits for a node. ``released``: attempts that were handed back; ``refused``: those of them that
    were because of an error of the node's own. ``cancelled``: why it shall end.
    """

    key: int
    record: SessionRecord
    body: bytes
    priority: int
    queued: bool
    released: int
    refused: int
    cancelled: str | None


def find(db: Connection, session_id: str) -> Stored | None:
    """The session of this id."""
    row = db.execute(
        "SELECT id, body, priority, queued, released, refused, cancelled FROM sessions WHERE session_id = ?",
        (session_id,),
    ).fetchone()
    if row is None:
        return None
    key, body, priority, queued, released, refused, cancelled = row
    reason = None if cancelled is None else loads(cancelled, str)
    return Stored(key, loads(body, SessionRecord), body, priority, bool(queued), released, refused, reason)


def add(db: Connection, record: SessionRecord, body: bytes, *, priority: int = 0, queued: bool = False) -> None:
    """A session that was not there before."""
    db.execute(
        "INSERT INTO sessions (session_id, task_id, sample_index, attempt, state, body, updated_at, priority, "
        "queued) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(record.session_id, record.task_id, record.sample_index, record.attempt, record.state, body),
            *(record.updated_at, priority, int(queued)),
        ),
    )
    events.session_moved(db, record)
    if record.state in TERMINAL_STATES:
        end_task_if_over(db, record.task_id, record.updated_at)


def move(
    db: Connection,
    stored: Stored,
    record: SessionRecord,
    body: bytes | None = None,
    *,
    queued: bool = False,
    released: int = 0,
    refused: int = 0,
) -> None:
    """Put a session where ``record`` says, ``released`` more attempts of it not counted, ``refused`` of them for an
    error of a node's own."""
    key, before = stored.key, stored.record
    db.execute(
        "UPDATE sessions SET attempt = ?, state = ?, body = ?, updated_at = ?, queued = ?, released = ?, refused = ? "
        "WHERE id = ?",
        (
            *(record.attempt, record.state, body or dumps(record), record.updated_at),
            *(int(queued), stored.released + released, stored.refused + refused, key),
        ),
    )
    ended = record.state in TERMINAL_STATES
    if ended or record.attempt != before.attempt:
        db.execute("UPDATE leases SET lapses = NULL WHERE session = ? AND lapses IS NOT NULL", (key,))
    if (record.attempt, record.state) != (before.attempt, before.state):
        events.session_moved(db, record)
    if ended:
        end_task_if_over(db, record.task_id, record.updated_at)


def end_task_if_over(db: Connection, task_id: str, now: float) -> None:
    """Tell of a task's end, and owe its callback, when none of its sessions is left."""
    if db.execute(f"SELECT 1 FROM sessions WHERE task_id = ? AND {OPEN} LIMIT 1", (task_id,)).fetchone():
        return
    task = db.execute("SELECT cancelled FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    if task is None:
        return  # a bare capture session
    events.add(db, "task", now, task_id, "completed" if task[0] is None else "cancelled", task_id)
    db.execute(
        "UPDATE callbacks SET retry_at = ? WHERE task_id = ? AND tries = 0 AND retry_at IS NULL AND error IS NULL",
        (now, task_id),
    )
