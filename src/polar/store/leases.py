"""Who runs what: tasks become sessions that wait, nodes take them under leases, and what a node lets go of, or loses
because it is not heard of any more, waits again under a new attempt. The attempt's number fences off whoever had the
one before.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polar.contract.result import TERMINAL_STATES
from polar.contract.rollout import HeartbeatReply, Held, Lease, NodeSpec
from polar.contract.task import TaskRequest
from polar.store import endings, events, nodes, rules, sessions
from polar.store.base import SessionRecord, StoreConflict
from polar.store.codec import dumps, loads
from polar.store.connection import Connection, chunks, marks
from polar.store.ledger import MAX_ATTEMPTS, MAX_HANDED_BACK


def submit(db: Connection, task: TaskRequest, body: bytes, now: float) -> bool:
    """Keep a task and let its sessions wait for nodes."""
    if not rules.put_task(db, task, body):
        return False
    events.add(db, "task", now, task.task_id, "running", task.task_id)
    if task.callback_url is not None:
        db.execute("INSERT INTO callbacks (task_id, url) VALUES (?, ?)", (task.task_id, task.callback_url))
    for sample in range(task.num_samples):
        record = SessionRecord(
            session_id=task.session_id(sample),
            task_id=task.task_id,
            sample_index=sample,
            created_at=now,
            updated_at=now,
        )
        taken = sessions.find(db, record.session_id)
        if taken is not None:
            raise StoreConflict(
                f"session {record.session_id} belongs to task {taken.record.task_id} already: choose another task_id"
            )
        sessions.add(db, record, dumps(record), priority=task.dispatch_priority, queued=True)
    if task.num_samples < 1:
        sessions.end_task_if_over(db, task.task_id, now)
    return True


def claim(
    db: Connection, node_id: str, room: int, seconds: float, now: float, claim_id: str | None = None
) -> list[Lease]:
    """Give waiting sessions to a node, or what this claim was given before."""
    if claim_id is not None:
        again = _claimed(db, node_id, claim_id, now + seconds)
        if again:
            return _leases(db, again, seconds)
    if room <= 0 or nodes.is_draining(db, node_id):
        return []
    rows = db.execute(
        "SELECT id, attempt, body FROM sessions WHERE queued = 1 ORDER BY priority DESC, id LIMIT ?", (room,)
    ).fetchall()
    for key, attempt, _ in rows:
        db.execute("UPDATE sessions SET queued = 0 WHERE id = ?", (key,))
        db.execute(
            "INSERT INTO leases (session, attempt, node_id, claim, lapses) VALUES (?, ?, ?, ?, ?)",
            (key, attempt, node_id, claim_id, now + seconds),
        )
    return _leases(db, [loads(body, SessionRecord) for _, _, body in rows], seconds)


def _claimed(db: Connection, node_id: str, claim_id: str, lapses: float) -> list[SessionRecord]:
    rows = db.execute(
        "SELECT s.id, s.body FROM leases l JOIN sessions s ON s.id = l.session "
        "WHERE l.node_id = ? AND l.lapses IS NOT NULL AND l.claim = ? ORDER BY s.priority DESC, s.id",
        (node_id, claim_id),
    ).fetchall()
    _prolong(db, [key for key, _ in rows], lapses)
    return [loads(body, SessionRecord) for _, body in rows]


def _leases(db: Connection, records: Sequence[SessionRecord], seconds: float) -> list[Lease]:
    tasks: dict[str, TaskRequest] = {}
    for record in records:
        if record.task_id not in tasks:
            body = db.execute("SELECT body FROM tasks WHERE task_id = ?", (record.task_id,)).fetchone()[0]
            tasks[record.task_id] = loads(body, TaskRequest)
    return [
        Lease(
            session_id=record.session_id,
            task_id=record.task_id,
            sample_index=record.sample_index,
            attempt=record.attempt,
            seconds=seconds,
            created_at=record.created_at,
            task=tasks[record.task_id],
        )
        for record in records
    ]


def renew(db: Connection, node_id: str, held: Sequence[Held], seconds: float, now: float) -> HeartbeatReply:
    """Prolong what the node holds of what it names, and keep the states it tells."""
    rows = db.execute(
        "SELECT s.session_id, s.id, l.attempt, s.state, s.cancelled "
        "FROM leases l JOIN sessions s ON s.id = l.session WHERE l.node_id = ? AND l.lapses IS NOT NULL",
        (node_id,),
    ).fetchall()
    leased = {name: rest for name, *rest in rows}
    keys: list[int] = []
    lost: list[str] = []
    cancelled: dict[str, str] = {}
    for told in held:
        key, attempt, state, reason = leased.get(told.session_id, (0, 0, "", None))
        if attempt != told.attempt:
            lost.append(told.session_id)
            continue
        keys.append(key)
        if reason is not None:
            cancelled[told.session_id] = loads(reason, str)
        # A terminal state comes with its result, and only so.
        if told.state != state and told.state not in TERMINAL_STATES:
            _enter(db, told, now)
    _prolong(db, keys, now + seconds)
    drain = nodes.heard(db, node_id, now, now + seconds)
    return HeartbeatReply(lost=lost, cancelled=cancelled, drain=drain)


def _enter(db: Connection, told: Held, now: float) -> None:
    stored = sessions.find(db, told.session_id)
    if stored is not None:
        sessions.move(db, stored, msgspec.structs.replace(stored.record, state=told.state, updated_at=now))


def _prolong(db: Connection, keys: Sequence[int], lapses: float) -> None:
    for some in chunks(keys):
        db.execute(
            f"UPDATE leases SET lapses = ? WHERE lapses IS NOT NULL AND session IN ({marks(some)})", (lapses, *some)
        )


def release(
    db: Connection, node_id: str, session_id: str, attempt: int, now: float, error: str | None = None
) -> None:
    """Let a session wait again; what was not this node's stays as it is."""
    stored = sessions.find(db, session_id)
    if stored is None or stored.record.attempt != attempt:
        return
    held = "SELECT 1 FROM leases WHERE session = ? AND attempt = ? AND node_id = ? AND lapses IS NOT NULL"
    if db.execute(held, (stored.key, attempt, node_id)).fetchone() is not None:
        _take_back(db, session_id, now, counts=False, error=None if error is None else f"{node_id}: {error}")


def expire(db: Connection, now: float) -> list[SessionRecord]:
    """Take back what has lapsed, and see which nodes are gone."""
    lapsed = db.execute(
        "SELECT s.session_id FROM leases l JOIN sessions s ON s.id = l.session WHERE l.lapses <= ? ORDER BY s.id",
        (now,),
    ).fetchall()
    nodes.mark_gone(db, now)
    events.trim(db)
    return [_take_back(db, name, now, counts=True) for (name,) in lapsed]


def register(db: Connection, spec: NodeSpec, now: float) -> None:
    """A node has come. What another process had under its id is taken back."""
    if not nodes.put(db, spec, now):
        return
    names = db.execute(
        "SELECT s.session_id FROM leases l JOIN sessions s ON s.id = l.session "
        "WHERE l.node_id = ? AND l.lapses IS NOT NULL ORDER BY s.id",
        (spec.node_id,),
    ).fetchall()
    for (name,) in names:
        _take_back(db, name, now, counts=True)


def _take_back(
    db: Connection, session_id: str, now: float, *, counts: bool, error: str | None = None
) -> SessionRecord:
    """A session that was held waits again, or has ended.

    Args:
        counts: against ``MAX_ATTEMPTS``.
        error: why its node has handed it back, where that counts against ``MAX_HANDED_BACK``.
    """
    stored = sessions.find(db, session_id)
    assert stored is not None, "a lease is of a session"
    record = stored.record
    if stored.cancelled is not None:
        endings.end_without_node(db, stored, stored.cancelled, now)
    elif counts and record.attempt - stored.released >= MAX_ATTEMPTS:
        lost = f"attempts exhausted: begun {MAX_ATTEMPTS} times, and each time its node was lost"
        endings.end_without_node(db, stored, lost, now)
    elif error is not None and stored.refused + 1 >= MAX_HANDED_BACK:
        refused = f"attempts exhausted: handed back {MAX_HANDED_BACK} times, at last by node {error}"
        endings.end_without_node(db, stored, refused, now)
    else:
        again = msgspec.structs.replace(
            record, attempt=record.attempt + 1, state="REGISTERED", updated_at=now, error=None
        )
        sessions.move(db, stored, again, queued=True, released=int(not counts), refused=int(error is not None))
    left = sessions.find(db, session_id)
    assert left is not None
    return left.record


def cancel(db: Connection, task_id: str, now: float, reason: str) -> list[SessionRecord] | None:
    """End a task before its sessions have all ended."""
    if db.execute("SELECT 1 FROM tasks WHERE task_id = ?", (task_id,)).fetchone() is None:
        return None
    if db.execute(f"SELECT 1 FROM sessions WHERE task_id = ? AND {sessions.OPEN} LIMIT 1", (task_id,)).fetchone():
        db.execute("UPDATE tasks SET cancelled = ? WHERE task_id = ? AND cancelled IS NULL", (dumps(reason), task_id))
        endings.cancel_rest(db, task_id, reason, now)
    rows = db.execute("SELECT body FROM sessions WHERE task_id = ? ORDER BY sample_index, id", (task_id,)).fetchall()
    return [loads(body, SessionRecord) for (body,) in rows]
