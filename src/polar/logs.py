"""Logs that machines read: one JSON object a line, with the ids of what it is about.

What works for one session says so once, with ``about``; a single line that knows more says it itself:
``log.info("...", extra={"call_id": ...})``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, TextIO

IDS = ("task_id", "session_id", "attempt", "node_id", "call_id")
NUMBERS = ("status", "seconds", "traces", "reward")
"""What the line about a session's end says apart, too."""

_ABOUT: ContextVar[dict[str, Any]] = ContextVar("_ABOUT")


@contextmanager
def about(**ids: Any) -> Iterator[None]:
    """What is logged inside, and by tasks and threads that are begun inside, is about these (names of ``IDS``)."""
    token = _ABOUT.set(_ABOUT.get({}) | ids)
    try:
        yield
    finally:
        _ABOUT.reset(token)


class JSONFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, the ids it names, and the error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _ABOUT.get({})
        line |= {name: getattr(record, name) for name in (*IDS, *NUMBERS) if hasattr(record, name)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, form: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Log everything from ``level`` on to ``stream`` (stderr by default), instead of what was set up before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else logging.Formatter("%(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
