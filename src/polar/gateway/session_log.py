"""Why: whoever follows a service's log wants to see each session come and go, and to find all lines about it.

One line at its begin, one at its end; what is logged between them names the session through ``polar.logs.about``.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

from polar.contract.result import SessionResult
from polar.logs import about
from polar.store.base import SessionRecord

log = logging.getLogger("polar.sessions")


def about_session(record: SessionRecord) -> AbstractContextManager[None]:
    """What is logged inside is about this session attempt."""
    return about(task_id=record.task_id, session_id=record.session_id, attempt=record.attempt)


def log_begin(record: SessionRecord) -> None:
    """A session attempt begins."""
    with about_session(record):
        log.info("session %s begins", record.session_id)


def log_end(record: SessionRecord, result: SessionResult, seconds: float) -> None:
    """A session attempt has ended, ``seconds`` after it began. The error is not in the line: its agent may have said
    it, and logs go where results don't."""
    traces = len(result.trajectory.traces)
    reward = result.trajectory.metadata.get("evaluation", {}).get("outcome_reward")
    said = "" if reward is None else f", reward {reward:g}"
    with about_session(record):
        log.info(
            "session %s ended: %s after %.1f s, %d traces%s",
            *(result.session_id, result.status, seconds, traces, said),
            extra={"status": result.status, "seconds": round(seconds, 3), "traces": traces, "reward": reward},
        )
