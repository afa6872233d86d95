"""What may be written over what: each write as one function inside the writer's transaction.

Every rule reads what is stored, then either finds the very same thing (nothing to do), or refuses with
StoreConflict, or writes. Only one process writes at a time, so what was read stays true.
"""

from __future__ import annotations

from collections.abc import Mapping

from polar.contract.completion import Completion
from polar.contract.result import TERMINAL_STATES
from polar.contract.task import TaskRequest
from polar.store import sessions
from polar.store.base import SessionRecord, StoreConflict
from polar.store.codec import CompletionRow, loads
from polar.store.connection import Connection


def put_task(db: Connection, task: TaskRequest, body: bytes) -> bool:
    """Keep a task once, and say whether it is new; bodies are compared by what they say, not by the order they say
    it in."""
    stored = db.execute("SELECT body FROM tasks WHERE task_id = ?", (task.task_id,)).fetchone()
    if stored is None:
        db.execute("INSERT INTO tasks (task_id, body) VALUES (?, ?)", (task.task_id, body))
        return True
    if stored[0] != body and (differ := _differences(loads(stored[0], TaskRequest), loads(body, TaskRequest))):
        what = f"task {task.task_id} exists with another body ({', '.join(differ)})"
        raise StoreConflict(f"{what}: choose another task_id")
    return False


def _differences(one: TaskRequest, other: TaskRequest) -> list[str]:
    """The fields that differ."""
    return [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]


def put_session(db: Connection, session: SessionRecord, body: bytes) -> None:
    """Insert the session, or move it on within the rules of attempts."""
    stored = sessions.find(db, session.session_id)
    if stored is None:
        sessions.add(db, session, body)
        return
    if stored.body == body:
        return
    name, before = session.session_id, stored.record
    if (before.task_id, before.sample_index) != (session.task_id, session.sample_index):
        raise StoreConflict(
            f"session {name} is sample {before.sample_index} of task {before.task_id}: choose another session_id"
        )
    if session.attempt < before.attempt:
        raise StoreConflict(f"session {name} is at attempt {before.attempt}: attempt {session.attempt} is over")
    if session.attempt == before.attempt and before.state in TERMINAL_STATES:
        raise StoreConflict(
            f"session {name}: attempt {before.attempt} ended as {before.state}; only a higher attempt may follow"
        )
    waits = (session.attempt, session.state) == (before.attempt, "REGISTERED")
    sessions.move(db, stored, session, body, queued=stored.queued and waits)


def put_completion(
    db: Connection,
    completion: Completion,
    row: CompletionRow,
    shared: Mapping[bytes, bytes],
    *,
    history: bool = False,
) -> bool:
    """Add a completion to its session's attempt; whether it is new.

    Args:
        history: the attempt may be over.
    """
    name, attempt = completion.completion_id, completion.attempt
    place = (completion.session_id, attempt, completion.seq)
    stored = db.execute(
        "SELECT session_id, c.attempt, seq, head, messages, tools, prompt, prompt_ref, response, logprobs "
        "FROM completions c JOIN sessions s ON s.id = c.session WHERE completion_id = ?",
        (name,),
    ).fetchone()
    if stored is not None:
        if tuple(stored) != (*place, *row):
            raise StoreConflict(f"completion {name} is stored with other content")
        return False
    session = db.execute(
        "SELECT id, attempt, state FROM sessions WHERE session_id = ?", (completion.session_id,)
    ).fetchone()
    if session is None:
        raise StoreConflict(f"completion {name}: session {completion.session_id} is not stored; put it first")
    key, current, state = session
    if attempt > current or (not history and (attempt != current or state in TERMINAL_STATES)):
        raise StoreConflict(
            f"completion {name} is of attempt {attempt}, but session {completion.session_id} is at "
            f"attempt {current}, {state}"
        )
    base = completion.base_id
    there = "SELECT 1 FROM completions WHERE completion_id = ? AND session = ? AND attempt = ?"
    if base is not None and db.execute(there, (base, key, attempt)).fetchone() is None:
        raise StoreConflict(f"completion {name} builds on {base}, which is not stored: nobody could read it")
    taken = "SELECT 1 FROM completions WHERE session = ? AND attempt = ? AND seq = ?"
    if db.execute(taken, (key, attempt, completion.seq)).fetchone() is not None:
        raise StoreConflict(
            f"completion {name}: session {completion.session_id} attempt {attempt} has another call "
            f"at seq {completion.seq}"
        )
    _share(db, key, shared)
    db.execute(
        "INSERT INTO completions (completion_id, session, attempt, seq, head, messages, tools, prompt, "
        "prompt_ref, response, logprobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (name, key, attempt, completion.seq, *row),
    )
    return True


def _share(db: Connection, session: int, shared: Mapping[bytes, bytes]) -> None:
    for digest, data in shared.items():
        known = db.execute("SELECT id FROM contents WHERE digest = ?", (digest,)).fetchone()
        if known is None:
            db.execute("INSERT INTO contents (digest, data) VALUES (?, ?)", (digest, data))
            known = db.execute("SELECT id FROM contents WHERE digest = ?", (digest,)).fetchone()
        db.execute(
            "INSERT INTO uses (session, content) VALUES (?, ?) ON CONFLICT DO NOTHING",
            (session, known[0]),
        )
