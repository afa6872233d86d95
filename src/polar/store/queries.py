"""What is read, each question as one function; all that one asks is of one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.contract.rollout import AuditEntry, Event, NodeInfo, NodeLoad, NodeSpec, TaskState
from polar.contract.task import TaskRequest
from polar.store.base import SessionRecord
from polar.store.codec import CompletionReader, CompletionRow, loads
from polar.store.connection import Args, Connection
from polar.store.ledger import PendingCallback, StoredResult, TaskProgress
from polar.store.sessions import OPEN

T = TypeVar("T")


def _objects(db: Connection, kind: type[T], query: str, args: Args = ()) -> list[T]:
    return [loads(body, kind) for (body,) in db.execute(query, args).fetchall()]


def task(db: Connection, task_id: str) -> TaskRequest | None:
    found = _objects(db, TaskRequest, "SELECT body FROM tasks WHERE task_id = ?", (task_id,))
    return found[0] if found else None


def tasks(db: Connection) -> list[TaskRequest]:
    return _objects(db, TaskRequest, "SELECT body FROM tasks ORDER BY id")


def session(db: Connection, session_id: str) -> SessionRecord | None:
    found = _objects(db, SessionRecord, "SELECT body FROM sessions WHERE session_id = ?", (session_id,))
    return found[0] if found else None


def sessions(db: Connection, task_id: str | None) -> list[SessionRecord]:
    if task_id is not None:
        query = "SELECT body FROM sessions WHERE task_id = ? ORDER BY sample_index, id"
        return _objects(db, SessionRecord, query, (task_id,))
    # Sessions of no stored task (bare captures) come last.
    query = (
        "SELECT s.body FROM sessions s LEFT JOIN tasks t ON t.task_id = s.task_id "
        "ORDER BY t.id IS NULL, t.id, s.task_id, s.sample_index, s.id"
    )
    return _objects(db, SessionRecord, query)


def recent_sessions(db: Connection, task_id: str | None, state: str | None, limit: int) -> list[SessionRecord]:
    named = {"task_id": task_id, "state": state}
    wanted = {column: value for column, value in named.items() if value is not None}
    where = f"WHERE {' AND '.join(f'{column} = ?' for column in wanted)} " if wanted else ""
    query = f"SELECT body FROM sessions {where}ORDER BY updated_at DESC, id DESC LIMIT ?"
    return _objects(db, SessionRecord, query, (*wanted.values(), limit))


def session_states(db: Connection) -> dict[str, int]:
    return dict(db.execute("SELECT state, count(*) FROM sessions GROUP BY state").fetchall())


def result(db: Connection, session_id: str, attempt: int) -> SessionResult | None:
    query = "SELECT body FROM results WHERE session_id = ? AND attempt = ?"
    found = _objects(db, SessionResult, query, (session_id, attempt))
    return found[0] if found else None


def results(db: Connection, task_id: str | None) -> list[SessionResult]:
    if task_id is None:
        return _objects(db, SessionResult, "SELECT body FROM results ORDER BY id")
    return _objects(db, SessionResult, "SELECT body FROM results WHERE task_id = ? ORDER BY id", (task_id,))


_COMPLETION = (
    "SELECT completion_id, session_id, c.attempt, seq, head, messages, tools, prompt, prompt_ref, response, logprobs "
)
_OF_SESSION = "FROM sessions s JOIN completions c ON c.session = s.id"


def completions(db: Connection, session_id: str, attempt: int | None) -> list[Completion]:
    if attempt is None:
        query = f"{_COMPLETION} {_OF_SESSION} AND c.attempt = s.attempt WHERE s.session_id = ? ORDER BY seq"
        return _completions(db, query, (session_id,))
    query = f"{_COMPLETION} {_OF_SESSION} WHERE s.session_id = ? AND c.attempt = ? ORDER BY seq"
    return _completions(db, query, (session_id, attempt))


def _completions(db: Connection, query: str, args: Args) -> list[Completion]:
    def lookup(digest: bytes) -> bytes:
        data: bytes = db.execute("SELECT data FROM contents WHERE digest = ?", (digest,)).fetchone()[0]
        return data

    reader = CompletionReader(lookup)
    rows = db.execute(query, args).fetchall()
    return [reader.decode(name, of, attempt, seq, CompletionRow(*row)) for name, of, attempt, seq, *row in rows]


# Of a journal. What is left to hand over is little, what is kept may be much: a cross join starts with its left side.


def unshipped(db: Connection, limit: int) -> list[Completion]:
    first = (
        "SELECT c.id FROM unshipped u CROSS JOIN completions c WHERE c.id = u.completion AND u.refused IS NULL "
        "ORDER BY c.session, c.attempt, c.seq LIMIT ?"
    )
    query = (
        f"{_COMPLETION} FROM ({first}) u CROSS JOIN completions c JOIN sessions s ON s.id = c.session "
        "WHERE c.id = u.id ORDER BY c.session, c.attempt, seq"
    )
    return _completions(db, query, (limit,))


def undelivered(db: Connection) -> list[SessionResult]:
    of = "undelivered d CROSS JOIN results r WHERE r.id = d.result AND d.refused IS NULL"
    return _objects(db, SessionResult, f"SELECT body FROM {of} ORDER BY r.id")


def refused(db: Connection, session_id: str, attempt: int) -> dict[str, str]:
    rows = db.execute(
        "SELECT c.completion_id, u.refused FROM unshipped u CROSS JOIN completions c JOIN sessions s "
        "ON s.id = c.session WHERE c.id = u.completion AND u.refused IS NOT NULL AND s.session_id = ? "
        "AND c.attempt = ? ORDER BY c.seq",
        (session_id, attempt),
    ).fetchall()
    return {name: loads(reason, str) for name, reason in rows}


# Of a ledger


def progress(db: Connection, task_id: str | None) -> list[TaskProgress]:
    rows = db.execute(
        "SELECT t.task_id, t.cancelled, count(s.id), "
        f"coalesce(sum(CASE WHEN s.{OPEN} THEN 0 WHEN s.id IS NULL THEN 0 ELSE 1 END), 0), "
        "(SELECT count(*) FROM results r WHERE r.task_id = t.task_id AND r.usable = 1) "
        "FROM tasks t LEFT JOIN sessions s ON s.task_id = t.task_id "
        + ("" if task_id is None else "WHERE t.task_id = ? ")
        + "GROUP BY t.id, t.task_id, t.cancelled ORDER BY t.id",
        () if task_id is None else (task_id,),
    ).fetchall()

    def state(cancelled: bytes | None, open_sessions: int) -> TaskState:
        if open_sessions:
            return "running"
        return "completed" if cancelled is None else "cancelled"

    return [
        TaskProgress(name, state(cancelled, count - ended), count, int(ended), usable)
        for name, cancelled, count, ended, usable in rows
    ]


def results_after(db: Connection, cursor: int, limit: int, task_id: str | None) -> list[StoredResult]:
    query = (
        "SELECT r.id, r.body FROM results r JOIN sessions s ON s.session_id = r.session_id AND s.attempt = r.attempt "
        "WHERE r.id > ? " + ("" if task_id is None else "AND r.task_id = ? ") + "ORDER BY r.id LIMIT ?"
    )
    args = (cursor, limit) if task_id is None else (cursor, task_id, limit)
    return [StoredResult(key, loads(body, SessionResult)) for key, body in db.execute(query, args).fetchall()]


def acknowledged(db: Connection, consumer: str) -> int:
    row = db.execute("SELECT acknowledged FROM cursors WHERE consumer = ?", (consumer,)).fetchone()
    return row[0] if row else 0


def callbacks_due(db: Connection, now: float, limit: int, but_not: Sequence[str]) -> list[PendingCallback]:
    query = (
        "SELECT task_id, url, tries, retry_at FROM callbacks b WHERE retry_at <= ? AND NOT EXISTS "
        f"(SELECT 1 FROM sessions WHERE task_id = b.task_id AND {OPEN}) "
    )
    others: list[str] = []
    for start in (f"{scheme}://{host}" for host in but_not for scheme in ("http", "https")):
        query += f"AND lower(url) <> ? AND substr(lower(url), 1, {len(start) + 1}) NOT IN (?, ?, ?) "
        others += [start, *(start + end for end in "/?#")]
    rows = db.execute(query + "ORDER BY retry_at, task_id LIMIT ?", (now, *others, limit)).fetchall()
    return [PendingCallback(*row) for row in rows]


def callbacks_failed(db: Connection) -> list[tuple[str, str]]:
    rows = db.execute("SELECT task_id, error FROM callbacks WHERE error IS NOT NULL ORDER BY task_id").fetchall()
    return [(task_id, loads(error, str)) for task_id, error in rows]


def newest_result(db: Connection) -> int:
    return _newest(db, "results")


def newest_event(db: Connection) -> int:
    return _newest(db, "events")


def _newest(db: Connection, table: str) -> int:
    newest: int | None = db.execute(f"SELECT max(id) FROM {table}").fetchone()[0]
    return newest or 0


def events_after(db: Connection, event_id: int, limit: int) -> list[Event]:
    rows = db.execute("SELECT id, body FROM events WHERE id > ? ORDER BY id LIMIT ?", (event_id, limit)).fetchall()
    return [msgspec.structs.replace(loads(body, Event), id=key) for key, body in rows]


def audit_log(db: Connection, limit: int) -> list[AuditEntry]:
    return _objects(db, AuditEntry, "SELECT body FROM audit ORDER BY id DESC LIMIT ?", (limit,))[::-1]


def to_forget(db: Connection) -> list[tuple[str, str]]:
    rows = db.execute("SELECT session_id, node_id FROM forgotten ORDER BY node_id, session_id").fetchall()
    return [(session_id, node_id) for session_id, node_id in rows]


def knows_node(db: Connection, node_id: str) -> bool:
    return db.execute("SELECT 1 FROM nodes WHERE node_id = ?", (node_id,)).fetchone() is not None


def nodes(db: Connection, now: float, loads_told: Mapping[str, tuple[NodeLoad, float]]) -> list[NodeInfo]:
    """Every node. ``loads_told``: how full they said they were, and when."""
    rows = db.execute(
        "SELECT spec, draining, heard_at, healthy_until, "
        "(SELECT count(*) FROM leases l WHERE l.node_id = nodes.node_id AND l.lapses IS NOT NULL) "
        "FROM nodes ORDER BY node_id"
    ).fetchall()
    return [_node(now, loads_told, *row) for row in rows]


def _node(
    now: float,
    loads_told: Mapping[str, tuple[NodeLoad, float]],
    body: bytes,
    draining: int,
    heard_at: float,
    healthy_until: float,
    leases: int,
) -> NodeInfo:
    spec = loads(body, NodeSpec)
    load, told_at = loads_told.get(spec.node_id, (NodeLoad(), 0.0))
    return NodeInfo(
        node_id=spec.node_id,
        gateway_url=spec.gateway_url,
        max_init_workers=spec.max_init_workers,
        max_run_workers=spec.max_run_workers,
        max_postrun_workers=spec.max_postrun_workers,
        metrics=load,
        healthy=now <= healthy_until,
        draining=bool(draining),
        last_heartbeat=max(heard_at, told_at),
        sessions=leases,
        worker_of=spec.worker_of,
        version=spec.version,
        harnesses=spec.harnesses,
        engines=spec.engines,
        credential=spec.credential,
    )
