"""A journal's memory of what it has not handed over yet: noted in the transaction that keeps it, struck off when the
server has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar.contract.completion import Completion
from polar.store import endings, rules
from polar.store.base import SessionRecord
from polar.store.codec import CompletionRow, dumps
from polar.store.connection import Connection, chunks, marks


def put_completion(db: Connection, completion: Completion, row: CompletionRow, shared: Mapping[bytes, bytes]) -> None:
    """Keep a call, to be handed over."""
    if rules.put_completion(db, completion, row, shared):
        db.execute(
            "INSERT INTO unshipped (completion) SELECT id FROM completions WHERE completion_id = ?",
            (completion.completion_id,),
        )


def finish_session(db: Connection, session: SessionRecord, body: bytes, end: endings.Ending, *, stored: bool) -> None:
    """Keep the end of an attempt, to be handed over."""
    if endings.finish_session(db, session, body, end, stored=stored):
        db.execute(
            "INSERT INTO undelivered (result) SELECT id FROM results WHERE session_id = ? AND attempt = ?",
            (session.session_id, session.attempt),
        )


def shipped(db: Connection, completion_ids: Sequence[str]) -> None:
    """These calls need not be handed over any more."""
    for some in chunks(completion_ids):
        db.execute(
            "DELETE FROM unshipped WHERE completion IN "
            f"(SELECT id FROM completions WHERE completion_id IN ({marks(some)}))",
            tuple(some),
        )


def set_aside(db: Connection, refused: Mapping[str, str]) -> None:
    """These calls are not handed over, each for its reason."""
    for completion_id, reason in refused.items():
        db.execute(
            "UPDATE unshipped SET refused = ? WHERE completion IN "
            "(SELECT id FROM completions WHERE completion_id = ?)",
            (dumps(reason), completion_id),
        )


def set_result_aside(db: Connection, session_id: str, attempt: int, reason: str) -> None:
    """This result is not handed over, for this reason."""
    db.execute(
        "UPDATE undelivered SET refused = ? WHERE result IN "
        "(SELECT id FROM results WHERE session_id = ? AND attempt = ?)",
        (dumps(reason), session_id, attempt),
    )


def delivered(db: Connection, session_id: str, attempt: int) -> None:
    """This result need not be handed over any more."""
    db.execute(
        "DELETE FROM undelivered WHERE result IN (SELECT id FROM results WHERE session_id = ? AND attempt = ?)",
        (session_id, attempt),
    )
