"""How a session attempt ends: its terminal state and its one result in the same transaction, whoever brings it, and
whatever follows from it for the rest of its task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from polar.contract.arrays import to_plain
from polar.contract.completion import Completion
from polar.contract.result import TERMINAL_STATES, Reconstruction, SessionResult, Trajectory
from polar.contract.task import BuilderSpec, TaskRequest
from polar.store import rules, sessions
from polar.store.base import NotHeld, SessionRecord, StoreConflict
from polar.store.codec import CompletionRow, dumps, encode_result, loads, tokens_trained
from polar.store.connection import Connection


class Ending(NamedTuple):
    """A result as it is kept."""

    result: SessionResult
    body: bytes
    usable: bool


def ending(result: SessionResult) -> Ending:
    """What to keep of a result, as it is now."""
    return Ending(msgspec.structs.replace(result), encode_result(result), tokens_trained(result) > 0)


def finish_session(db: Connection, session: SessionRecord, body: bytes, end: Ending, *, stored: bool) -> bool:
    """The terminal state and the result, or neither; whether they are new. ``stored``: only of a session that is."""
    if stored and sessions.find(db, session.session_id) is None:
        raise StoreConflict(f"session {session.session_id} is not stored: it was forgotten")
    repeated = _is_repeated(db, end)
    if not repeated:
        _refuse_ended(db, session)
    rules.put_session(db, session, body)
    if not repeated:
        _keep(db, end, session.updated_at)
    return not repeated


def end_attempt(db: Connection, stored: sessions.Stored, end: Ending, now: float) -> None:
    """End the newest attempt of a session, which has not ended, with this result."""
    error = end.result.error
    record = msgspec.structs.replace(stored.record, state=end.result.status, error=error, updated_at=now)
    sessions.move(db, stored, record)
    _keep(db, end, now)


def end_without_node(db: Connection, stored: sessions.Stored, error: str, now: float) -> None:
    """End a session that no node holds, as ERROR. Its calls, if there are any, are accounted for as not built."""
    record = stored.record
    body = db.execute("SELECT body FROM tasks WHERE task_id = ?", (record.task_id,)).fetchone()
    task = loads(body[0], TaskRequest) if body else None
    calls = db.execute(
        "SELECT completion_id FROM completions WHERE session = ? AND attempt = ? ORDER BY seq",
        (stored.key, record.attempt),
    ).fetchall()
    holder = db.execute(
        "SELECT node_id FROM leases WHERE session = ? AND attempt = ?", (stored.key, record.attempt)
    ).fetchone()
    result = SessionResult(
        session_id=record.session_id,
        task_id=record.task_id,
        attempt=record.attempt,
        status="ERROR",
        trajectory=_unbuilt([name for (name,) in calls], task.builder if task else BuilderSpec(), error),
        node_id=holder[0] if holder else "",
        error=error,
        metadata=dict(task.metadata) if task else {},
    )
    end_attempt(db, stored, ending(result), now)


def deliver(
    db: Connection,
    node_id: str,
    session_id: str,
    attempt: int,
    completions: Sequence[tuple[Completion, CompletionRow, dict[bytes, bytes]]],
    end: Ending | None,
    now: float,
) -> None:
    """Keep what a node hands over of an attempt that it holds; calls also of one that it has held."""
    stored = sessions.find(db, session_id)
    if stored is None:
        raise StoreConflict(f"session {session_id} is not stored: it was forgotten, or is another server's")
    lease = db.execute(
        "SELECT node_id, lapses FROM leases WHERE session = ? AND attempt = ?", (stored.key, attempt)
    ).fetchone()
    if lease is None or lease[0] != node_id:
        raise NotHeld(f"node {node_id} does not hold session {session_id} attempt {attempt}")
    for completion, row, shared in completions:
        rules.put_completion(db, completion, row, shared, history=True)
    if end is None or _is_repeated(db, end):
        return
    record = stored.record
    if lease[1] is None:
        raise StoreConflict(
            f"session {session_id}: attempt {attempt} is over, it is at attempt {record.attempt}, {record.state}"
        )
    if end.result.task_id != record.task_id:
        raise StoreConflict(f"session {session_id} is of task {record.task_id}, not of {end.result.task_id}")
    end_attempt(db, stored, end, now)


def cancel_rest(db: Connection, task_id: str, reason: str, now: float) -> bool:
    """End what waits, and mark what is held for its holder to end; whether there was anything."""
    names = db.execute(
        f"SELECT session_id FROM sessions WHERE task_id = ? AND {sessions.OPEN} ORDER BY id", (task_id,)
    ).fetchall()
    # Marked first: the last one that ends here may be the task's end.
    db.execute(
        f"UPDATE sessions SET cancelled = ? WHERE task_id = ? AND cancelled IS NULL AND {sessions.OPEN}",
        (dumps(reason), task_id),
    )
    for (name,) in names:
        stored = sessions.find(db, name)
        if stored is not None and stored.queued:
            end_without_node(db, stored, reason, now)
    return bool(names)


def _keep(db: Connection, end: Ending, now: float) -> None:
    result = end.result
    db.execute(
        "INSERT INTO results (session_id, attempt, task_id, body, usable) VALUES (?, ?, ?, ?, ?)",
        (result.session_id, result.attempt, result.task_id, end.body, int(end.usable)),
    )
    if end.usable:
        _stop_early(db, result.task_id, now)


def _stop_early(db: Connection, task_id: str, now: float) -> None:
    body = db.execute("SELECT body FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    enough = loads(body[0], TaskRequest).early_stop_min_usable_sessions if body else None
    if enough is None:
        return
    usable = db.execute("SELECT count(*) FROM results WHERE task_id = ? AND usable = 1", (task_id,)).fetchone()[0]
    if usable >= enough:
        cancel_rest(db, task_id, f"early stop: {usable} usable sessions", now)


def _is_repeated(db: Connection, end: Ending) -> bool:
    """Whether this very result is stored already; another one is a conflict."""
    key = (end.result.session_id, end.result.attempt)
    stored = db.execute("SELECT body FROM results WHERE session_id = ? AND attempt = ?", key).fetchone()
    if stored is not None and stored[0] != end.body:
        raise StoreConflict(f"session {key[0]}: attempt {key[1]} is finished with another result")
    return stored is not None


def _refuse_ended(db: Connection, session: SessionRecord) -> None:
    # An attempt that ended without a result must not get one later, not even under the very same record.
    ended = db.execute(
        "SELECT state FROM sessions WHERE session_id = ? AND attempt = ?", (session.session_id, session.attempt)
    ).fetchone()
    if ended is not None and ended[0] in TERMINAL_STATES:
        raise StoreConflict(f"session {session.session_id}: attempt {session.attempt} ended as {ended[0]} already")


def _unbuilt(completions: list[str], builder: BuilderSpec, error: str) -> Trajectory:
    fates = {"not_built": completions} if completions else {}
    return Trajectory(
        status="ERROR",
        error=error,
        metadata={
            "builder": builder.strategy,
            "record_count": len(completions),
            "trace_count": 0,
            "merge_factor": 0.0,
            "reconstruction": to_plain(Reconstruction(completions=fates)),
            "provenance": {},
        },
    )
