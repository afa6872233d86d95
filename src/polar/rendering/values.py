"""Bare values of tool arguments, made JSON by the tool's schema.

Families that write a parameter as text between tags say nothing of its type. So a value is JSON where the
schema says that it is no string, and otherwise the text as it stands. Text that is no JSON stays text: it must
not vanish, and the harness tells the model what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polar.contract.chat import Tool

_PYTHON = {"True": True, "False": False, "None": None}


class Values:
    """Types the values of calls to these tools."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: (tool.parameters or {}).get("properties") or {} for tool in tools}

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._schemas

    def typed(self, name: str, key: str, text: str) -> Any:
        """The value of parameter ``key`` in a call of ``name``."""
        return text if self._may_be_string(name, key) else json_or_text(text)

    def _may_be_string(self, name: str, key: str) -> bool:
        properties = self._schemas.get(name)
        schema = properties.get(key) if isinstance(properties, dict) else None
        kinds = _kinds(schema)
        return not kinds or "string" in kinds


def json_or_text(text: str) -> Any:
    """The JSON value that a text is, a Python constant that a model wrote for one, else the text."""
    word = text.strip()
    if word in _PYTHON:
        return _PYTHON[word]
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return text


def _kinds(schema: Any) -> set[str]:
    """The types that a schema names, in ``type`` or in its alternatives; none if it names none."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            kinds |= _kinds(option) or {"string"}
    return kinds
