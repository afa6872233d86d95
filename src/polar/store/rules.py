"""What may be written over what: each write as one function inside the writer's transaction.

Every rule reads what is stored, then either finds the very same thing (nothing to do), or refuses with
StoreConflict, or writes. The writing process is alone with the file, so what was read stays true.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from polar.contract.completion import Completion
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.task import TaskRequest
from polar.store.base import SessionRecord, StoreConflict
from polar.store.codec import CompletionRow, loads


def put_task(db: sqlite3.Connection, task: TaskRequest, body: bytes) -> None:
    """Keep a task once; bodies are compared by what they say, not by the order they say it in."""
    stored = db.execute("SELECT body FROM tasks WHERE task_id = ?", (task.task_id,)).fetchone()
    if stored is None:
        db.execute("INSERT INTO tasks (task_id, body) VALUES (?, ?)", (task.task_id, body))
    elif stored[0] != body and loads(stored[0], TaskRequest) != loads(body, TaskRequest):
        raise StoreConflict(f"task {task.task_id} exists with another body: choose another task_id")


def put_session(db: sqlite3.Connection, session: SessionRecord, body: bytes) -> None:
    """Insert the session, or move it on within the rules of attempts."""
    name = session.session_id
    stored = db.execute(
        "SELECT task_id, sample_index, attempt, state, body FROM sessions WHERE session_id = ?", (name,)
    ).fetchone()
    values = (session.task_id, session.sample_index, session.attempt, session.state, body, name)
    if stored is None:
        db.execute(
            "INSERT INTO sessions (task_id, sample_index, attempt, state, body, session_id) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            values,
        )
        return
    task_id, sample_index, attempt, state, stored_body = stored
    if stored_body == body:
        return
    if (task_id, sample_index) != (session.task_id, session.sample_index):
        raise StoreConflict(f"session {name} is sample {sample_index} of task {task_id}: choose another session_id")
    if session.attempt < attempt:
        raise StoreConflict(f"session {name} is at attempt {attempt}: attempt {session.attempt} is over")
    if session.attempt == attempt and state in TERMINAL_STATES:
        raise StoreConflict(f"session {name}: attempt {attempt} ended as {state}; only a higher attempt may follow")
    db.execute(
        "UPDATE sessions SET task_id = ?, sample_index = ?, attempt = ?, state = ?, body = ? WHERE session_id = ?",
        values,
    )


def put_completion(
    db: sqlite3.Connection, completion: Completion, row: CompletionRow, shared: Mapping[bytes, bytes]
) -> None:
    """Add a completion to its session's attempt."""
    name, attempt = completion.completion_id, completion.attempt
    place = (completion.session_id, attempt, completion.seq)
    stored = db.execute(
        "SELECT session_id, c.attempt, seq, head, messages, tools, prompt, prompt_ref, response, logprobs "
        "FROM completions c JOIN sessions s ON s.id = c.session WHERE completion_id = ?",
        (name,),
    ).fetchone()
    if stored is not None:
        if stored != (*place, *row):
            raise StoreConflict(f"completion {name} is stored with other content")
        return
    session = db.execute(
        "SELECT id, attempt, state FROM sessions WHERE session_id = ?", (completion.session_id,)
    ).fetchone()
    if session is None:
        raise StoreConflict(f"completion {name}: session {completion.session_id} is not stored; put it first")
    key, current, state = session
    if attempt != current or state in TERMINAL_STATES:
        raise StoreConflict(
            f"completion {name} is of attempt {attempt}, but session {completion.session_id} is at "
            f"attempt {current}, {state}"
        )
    for content in shared.items():
        db.execute("INSERT OR IGNORE INTO contents (digest, data) VALUES (?, ?)", content)
    try:
        db.execute(
            "INSERT INTO completions (completion_id, session, attempt, seq, head, messages, tools, prompt, "
            "prompt_ref, response, logprobs) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (name, key, attempt, completion.seq, *row),
        )
    except sqlite3.IntegrityError:
        raise StoreConflict(
            f"completion {name}: session {completion.session_id} attempt {attempt} has another call "
            f"at seq {completion.seq}"
        ) from None


def finish_session(
    db: sqlite3.Connection, session: SessionRecord, body: bytes, result: SessionResult, result_body: bytes
) -> None:
    """The terminal state and the result, or neither."""
    key = (result.session_id, result.attempt)
    stored = db.execute("SELECT body FROM results WHERE session_id = ? AND attempt = ?", key).fetchone()
    if stored is not None and stored[0] != result_body:
        raise StoreConflict(f"session {key[0]}: attempt {key[1]} is finished with another result")
    if stored is None:
        _refuse_ended(db, session)
    put_session(db, session, body)
    if stored is None:
        db.execute(
            "INSERT INTO results (session_id, attempt, task_id, body) VALUES (?, ?, ?, ?)",
            (*key, result.task_id, result_body),
        )


def _refuse_ended(db: sqlite3.Connection, session: SessionRecord) -> None:
    # An attempt that ended without a result must not get one later, not even under the very same record.
    ended = db.execute(
        "SELECT state FROM sessions WHERE session_id = ? AND attempt = ?", (session.session_id, session.attempt)
    ).fetchone()
    if ended is not None and ended[0] in TERMINAL_STATES:
        raise StoreConflict(f"session {session.session_id}: attempt {session.attempt} ended as {ended[0]} already")
