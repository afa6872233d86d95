"""Forgetting: whole tasks and bare sessions, oldest first, one at a time so that writers need not wait for all of it.

Contents that several sessions share go with the last session that refers to them.
"""

from __future__ import annotations

from polar.store import events, nodes
from polar.store.base import StoreConflict
from polar.store.connection import Connection
from polar.store.ledger import Purged
from polar.store.sessions import OPEN

# Has moved only now, or has something that a journal must still hand over: what was set aside is not handed over.
_RECENT = """(s.updated_at >= ?
    OR EXISTS (SELECT 1 FROM completions c JOIN unshipped u ON u.completion = c.id
        WHERE c.session = s.id AND u.refused IS NULL)
    OR EXISTS (SELECT 1 FROM results r JOIN undelivered d ON d.result = r.id
        WHERE r.session_id = s.session_id AND d.refused IS NULL))"""

# Has something that was set aside, and is nowhere else.
_ASIDE = """(EXISTS (SELECT 1 FROM completions c JOIN unshipped u ON u.completion = c.id WHERE c.session = s.id)
    OR EXISTS (SELECT 1 FROM results r JOIN undelivered d ON d.result = r.id WHERE r.session_id = s.session_id))"""

_NEEDED = f"(s.{OPEN} OR {_RECENT})"

_TASK_OVER = f"""EXISTS (SELECT 1 FROM sessions s WHERE s.task_id = t.task_id)
    AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.task_id = t.task_id AND {_NEEDED})
    AND NOT EXISTS (SELECT 1 FROM callbacks b WHERE b.task_id = t.task_id AND b.retry_at IS NOT NULL)"""

_BARE_OVER = f"NOT EXISTS (SELECT 1 FROM tasks t WHERE t.task_id = s.task_id) AND NOT {_NEEDED}"

NOTHING = Purged(0, 0, 0)


def tasks_over(db: Connection, before: float) -> list[str]:
    """Tasks all of whose sessions ended before ``before``, with nothing left to hand over; oldest first."""
    rows = db.execute(f"SELECT t.task_id FROM tasks t WHERE {_TASK_OVER} ORDER BY t.id", (before,)).fetchall()
    return [task_id for (task_id,) in rows]


def bare_over(db: Connection, before: float) -> list[str]:
    """Sessions of no stored task that ended before ``before``, likewise."""
    rows = db.execute(f"SELECT s.session_id FROM sessions s WHERE {_BARE_OVER} ORDER BY s.id", (before,)).fetchall()
    return [session_id for (session_id,) in rows]


def forget_task(db: Connection, task_id: str, before: float) -> Purged:
    """Drop a task and its sessions, if it is still over."""
    over = f"SELECT 1 FROM tasks t WHERE t.task_id = ? AND {_TASK_OVER}"
    if db.execute(over, (task_id, before)).fetchone() is None:
        return NOTHING
    rows = db.execute("SELECT id, session_id FROM sessions WHERE task_id = ?", (task_id,)).fetchall()
    completions = sum(_forget(db, key, session_id) for key, session_id in rows)
    db.execute("DELETE FROM callbacks WHERE task_id = ?", (task_id,))
    db.execute("DELETE FROM tasks WHERE task_id = ?", (task_id,))
    return Purged(1, len(rows), completions)


def forget_bare(db: Connection, session_id: str, before: float) -> Purged:
    """Drop a session of no stored task, if it is still over."""
    over = f"SELECT s.id FROM sessions s WHERE s.session_id = ? AND {_BARE_OVER}"
    row = db.execute(over, (session_id, before)).fetchone()
    return NOTHING if row is None else Purged(0, 1, _forget(db, row[0], session_id))


def forget_session(db: Connection, session_id: str) -> int:
    """Drop a session of no stored task, whatever its state; how many calls that were."""
    row = db.execute(
        "SELECT s.id, s.task_id, t.id FROM sessions s LEFT JOIN tasks t ON t.task_id = s.task_id "
        "WHERE s.session_id = ?",
        (session_id,),
    ).fetchone()
    if row is None:
        return 0
    if row[2] is not None:
        raise StoreConflict(f"session {session_id} is of task {row[1]}: it is forgotten with its task")
    return _forget(db, row[0], session_id)


def forget_there_later(db: Connection, session_id: str, node_id: str) -> int:
    """Drop a session of no stored task, and remember that a node still has it; how many calls were here."""
    calls = forget_session(db, session_id)
    db.execute(
        "INSERT INTO forgotten (session_id, node_id) VALUES (?, ?) ON CONFLICT DO NOTHING", (session_id, node_id)
    )
    return calls


def forgotten_there(db: Connection, session_id: str, node_id: str) -> None:
    """The node does not have it any more."""
    db.execute("DELETE FROM forgotten WHERE session_id = ? AND node_id = ?", (session_id, node_id))


def handed_over(db: Connection, before: float, aside: bool) -> list[str]:
    """Sessions of a journal that have not moved since ``before``, ended or not, with nothing left to hand over.
    ``aside``: also those with something that was set aside."""
    over = f"SELECT s.session_id FROM sessions s WHERE {_handed_over(aside)} ORDER BY s.id"
    rows = db.execute(over, (before,)).fetchall()
    return [session_id for (session_id,) in rows]


def forget_handed_over(db: Connection, session_id: str, before: float, aside: bool) -> Purged:
    """Drop a session of a journal, if it still may go, and its task with the last of its sessions."""
    over = f"SELECT s.id, s.task_id FROM sessions s WHERE s.session_id = ? AND {_handed_over(aside)}"
    row = db.execute(over, (session_id, before)).fetchone()
    if row is None:
        return NOTHING
    key, task_id = row
    completions = _forget(db, key, session_id)
    tasks = db.execute(
        "DELETE FROM tasks WHERE task_id = ? AND NOT EXISTS (SELECT 1 FROM sessions WHERE task_id = tasks.task_id)",
        (task_id,),
    ).rowcount
    return Purged(tasks, 1, completions)


def _handed_over(aside: bool) -> str:
    return f"NOT {_RECENT}" if aside else f"NOT {_RECENT} AND NOT {_ASIDE}"


def _forget(db: Connection, key: int, session_id: str) -> int:
    """Drop a session with all that is its own; how many calls that were."""
    db.execute("DELETE FROM unshipped WHERE completion IN (SELECT id FROM completions WHERE session = ?)", (key,))
    db.execute("DELETE FROM undelivered WHERE result IN (SELECT id FROM results WHERE session_id = ?)", (session_id,))
    contents = db.execute("SELECT content FROM uses WHERE session = ?", (key,)).fetchall()
    db.execute("DELETE FROM uses WHERE session = ?", (key,))
    for (content,) in contents:
        db.execute(
            "DELETE FROM contents WHERE id = ? AND NOT EXISTS (SELECT 1 FROM uses WHERE content = contents.id)",
            (content,),
        )
    completions = db.execute("DELETE FROM completions WHERE session = ?", (key,)).rowcount
    db.execute("DELETE FROM results WHERE session_id = ?", (session_id,))
    db.execute("DELETE FROM leases WHERE session = ?", (key,))
    db.execute("DELETE FROM sessions WHERE id = ?", (key,))
    return completions


def tidy(db: Connection, before: float) -> None:
    """Drop nodes that are long gone, and events as old as what is forgotten, or beyond those that are kept."""
    nodes.forget(db, before)
    events.forget(db, before)
    events.trim(db)
