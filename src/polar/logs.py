"""Logs that machines read: one JSON object a line, with the ids of what it is about.

A call that knows them says so: ``log.info("...", extra={"session_id": ...})``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal, TextIO

IDS = ("task_id", "session_id", "attempt", "node_id", "call_id")


class JSONFormatter(logging.Formatter):
    """A record as one line of JSON: time, level, logger, message, the ids it names, and the error's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in IDS if hasattr(record, name)}
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
