"""How results reach those who asked for them: cursors of consumers that pull, callbacks owed to the others."""

from __future__ import annotations

from polar.store.codec import dumps
from polar.store.connection import Connection


def acknowledge(db: Connection, consumer: str, cursor: int) -> None:
    """Remember how far a consumer is; it never goes back."""
    db.execute(
        "INSERT INTO cursors (consumer, acknowledged) VALUES (?, ?) ON CONFLICT (consumer) DO UPDATE "
        "SET acknowledged = excluded.acknowledged WHERE excluded.acknowledged > cursors.acknowledged",
        (consumer, max(cursor, 0)),
    )


def put_off_callback(db: Connection, task_id: str, due_at: float, until: float) -> bool:
    """Let a callback be due later, if it is due when the caller believes it is."""
    changed = db.execute(
        "UPDATE callbacks SET retry_at = ? WHERE task_id = ? AND retry_at = ?", (until, task_id, due_at)
    ).rowcount
    return changed == 1


def callback_tried(db: Connection, task_id: str, *, arrived: bool, retry_at: float | None, error: str | None) -> None:
    """How a try went. A callback that has arrived is owed no more, whatever is heard of an older try."""
    owed = "(retry_at IS NOT NULL OR error IS NOT NULL)"
    db.execute(
        f"UPDATE callbacks SET tries = tries + 1, retry_at = ?, error = ? WHERE task_id = ? AND {owed}",
        (None if arrived else retry_at, None if arrived else dumps(error or "no answer"), task_id),
    )
