"""What has happened, told in the transaction in which it happened, so that nobody hears of what did not."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Literal

from polar.contract.rollout import AuditEntry, Event
from polar.store.base import SessionRecord
from polar.store.codec import dumps, loads
from polar.store.connection import Connection
from polar.store.ledger import EVENTS_KEPT


def session_moved(db: Connection, record: SessionRecord) -> None:
    """A session has entered a state."""
    data: dict[str, Any] = {"attempt": record.attempt}
    if record.error is not None:
        data["error"] = record.error
    add(db, "session", record.updated_at, record.session_id, record.state, record.task_id, data)


def add(
    db: Connection,
    kind: Literal["task", "session", "node"],
    time: float,
    subject: str,
    state: str,
    task_id: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Tell of something. The id that it gets is the row's."""
    event = Event(id=0, kind=kind, time=time, subject=subject, state=state, task_id=task_id, data=data or {})
    db.execute("INSERT INTO events (body) VALUES (?)", (dumps(event),))


def trim(db: Connection) -> None:
    """Drop all but the newest ``EVENTS_KEPT``."""
    newest = db.execute("SELECT max(id) FROM events").fetchone()[0]
    if newest is not None:
        db.execute("DELETE FROM events WHERE id <= ?", (newest - EVENTS_KEPT,))


def forget(db: Connection, before: float) -> None:
    """Drop the oldest events, as far as they are of before ``before``; never the newest, after which ids go on."""
    newest = db.execute("SELECT max(id) FROM events").fetchone()[0]
    while newest is not None:
        query = "SELECT id, body FROM events WHERE id < ? ORDER BY id LIMIT 1000"
        old = list(takewhile(lambda row: loads(row[1], Event).time < before, db.execute(query, (newest,)).fetchall()))
        if not old:
            return
        db.execute("DELETE FROM events WHERE id <= ?", (old[-1][0],))


def audit(db: Connection, entry: AuditEntry) -> None:
    """Append to the audit log, in which the database itself refuses changes."""
    db.execute("INSERT INTO audit (body) VALUES (?)", (dumps(entry),))
