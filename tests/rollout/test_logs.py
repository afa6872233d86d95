"""Logs that machines read."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from polar import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_is_json_with_the_ids_it_names() -> None:
    stream = io.StringIO()
    logs.configure("INFO", "json", stream)
    log = logging.getLogger("polar.x")
    log.info("over\ntwo %s", "lines", extra={"session_id": "s1", "task_id": "t1", "other": "no"})
    log.debug("not this")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["message"], first["session_id"], first["task_id"]) == ("over\ntwo lines", "s1", "t1")
    assert "other" not in first
    assert (first["level"], first["logger"], first["time"][-1]) == ("info", "polar.x", "Z")
    assert "ValueError: why" in second["error"]


def test_text_is_one_line_for_a_reader() -> None:
    stream = io.StringIO()
    logs.configure("WARNING", "text", stream)
    logging.getLogger("polar.x").warning("careful")
    assert stream.getvalue() == "WARNING careful\n"
