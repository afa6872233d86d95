"""Why: a harness compacts, retries or gives up by what kind of error it is told. Here an engine's error (its
status and its words, which differ between engines and versions) becomes one of our kinds.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from polar.engines.base import EngineError, ErrorKind

_LONGEST = 600
"""Characters of an engine's own words that are kept: a page of HTML helps nobody."""

_CONTEXT_LENGTH = re.compile(
    r"context_length_exceeded"
    r"|maximum context length"
    r"|context length is only"
    r"|longer than the model'?s context length"
    r"|longer than the maximum model length"
    r"|exceeds the maximum allowed (input )?length"
    r"|maximum prompt length"
    r"|prompt is too long"
    r"|exceeds? the (available )?context (size|window|length)",
    re.IGNORECASE,
)
_PROMPT_TOKENS = re.compile(
    r"\((\d+) in the messages"
    r"|messages resulted in (\d+) tokens"
    r"|(?:passed|has|contains|contains at least) (\d+) input tokens"
    r"|(\d+) tokens from the input messages"
    r"|input \((\d+) tokens\)"
    r"|input length \((\d+) tokens\)"
    r"|prompt \(length (\d+)\)"
    r"|too long: (\d+) tokens"
    r"|request contains (\d+) tokens"
    r"|request \((\d+) tokens\)",
    re.IGNORECASE,
)
_LIMIT = re.compile(
    r"context length (?:is only|is|of) (\d+)"
    r"|context length \((\d+) tokens\)"
    r"|maximum model length of (\d+)"
    r"|maximum allowed (?:input )?length \((\d+) tokens\)"
    r"|maximum prompt length is (\d+)"
    r"|> (\d+) maximum"
    r"|context size \((\d+) tokens\)",
    re.IGNORECASE,
)


def error_of_reply(status: int, body: bytes, url: str) -> EngineError:
    """The error behind an HTTP reply that is not 200."""
    return _error(status, _words_of_body(body), url)


def error_of_event(error: Any, url: str) -> EngineError:
    """The error behind an ``{"error": ...}`` inside a stream that began well."""
    if not isinstance(error, dict):
        return _error(500, str(error), url)
    return _error(_status_of(error), _words_of(error), url)


def _error(status: int, words: str, url: str) -> EngineError:
    words = " ".join(words.split())[:_LONGEST] or "no words"
    if 400 <= status < 500 and _CONTEXT_LENGTH.search(words):
        return EngineError(
            "context_length",
            f"{words} [{url}]",
            status=status,
            prompt_tokens=_first_number(_PROMPT_TOKENS, words),
            context_length=_first_number(_LIMIT, words),
        )
    if status in (401, 403):
        return EngineError("bad_request", f"{url} refused the engine's API key ({status}): {words}", status=status)
    return EngineError(_kind(status), f"{url} answered {status}: {words}", status=status)


def _kind(status: int) -> ErrorKind:
    if status in (429, 503):
        return "overloaded"
    if 400 <= status < 500 and status != 408:
        return "bad_request"
    return "unavailable"


def _status_of(error: dict[str, Any]) -> int:
    for field in ("code", "status", "status_code"):
        value = error.get(field)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and 400 <= value < 600:
            return value
    told = f"{error.get('type')} {error.get('code')}".lower().replace("_", "")
    if "ratelimit" in told or "overloaded" in told:
        return 429
    return 400 if "badrequest" in told or "invalidrequest" in told or "contextlength" in told else 500


def _words_of_body(body: bytes) -> str:
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")
    return _words_of(told)


def _words_of(told: Any) -> str:
    """The message in ``{"error": {"message"}}``, ``{"message"}`` or ``{"detail"}``, with its code in front
    where that is a word (``context_length_exceeded``)."""
    if not isinstance(told, dict):
        return str(told)
    if "error" in told:
        return _words_of(told["error"])
    words = str(told.get("message") or told.get("detail") or told)
    code = told.get("code")
    return f"{code}: {words}" if isinstance(code, str) and not code.isdigit() else words


def _first_number(pattern: re.Pattern[str], words: str) -> int | None:
    found = pattern.search(words)
    return next(int(group) for group in found.groups() if group) if found else None
