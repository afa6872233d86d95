"""Why: in some APIs a tool call's input must be a JSON object, and a model may sample anything. Where its arguments
are none, the client gets ``{"__unparsedToolInput": {"raw": TEXT}}``, and an input of this form is read as its raw
text again, so that the history says what was sampled. The key is the one that Claude Code itself uses for input that
it can't parse.
"""

from __future__ import annotations

from typing import Any

import orjson

_KEY = "__unparsedToolInput"


def object_json(arguments: str) -> bytes:
    """Sampled arguments as the JSON of an object in any case."""
    if not arguments.strip():
        return b"{}"
    value = json_object(arguments)
    # What looks like our wrapper is wrapped as well, so that reading it gives back what was sampled.
    if value is None or raw_text(value) is not None:
        return orjson.dumps({_KEY: {"raw": arguments}})
    return arguments.encode()


def raw_text(value: dict[str, Any]) -> str | None:
    """The raw text inside, if this is a wrapper (Claude Code's own has a length beside it)."""
    inner = value.get(_KEY) if len(value) == 1 else None
    raw = inner.get("raw") if isinstance(inner, dict) else None
    return raw if isinstance(raw, str) else None


def json_object(text: str) -> dict[str, Any] | None:
    """The object that the text is, if it is one."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
