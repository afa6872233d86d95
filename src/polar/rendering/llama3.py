"""Tool calls as Llama 3 writes them: the whole reply is ``{"name": ..., "parameters": {...}}``, maybe behind
``<|python_tag|>``.

A reply that begins like such an object is held until it ends. One that is no call (an ordinary JSON answer,
two objects, code behind the tag) is visible text as it stands: the model's templates know one call a reply.
"""

from __future__ import annotations

import re

from polar.contract.chat import Delta, TextDelta
from polar.rendering.jsonscan import scan_object
from polar.rendering.parsers import NewId, call_deltas

TAG = "<|python_tag|>"
_KEYS = ("name", "parameters", "arguments", "type")
_BEGINNING = re.compile(r'\s*\{\s*(?:"([^"]*)("?))?')


class Llama3Parser:
    """Reads a reply that is one JSON call."""

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._call: bool | None = None  # not yet known

    def feed(self, text: str) -> list[Delta]:
        """More text."""
        self._buffer += text
        if self._call is None:
            self._call = _looks_like_call(self._buffer)
        return self._release() if self._call is False else []

    def finish(self) -> list[Delta]:
        """The end of the text."""
        if not self._buffer:
            return []
        body = self._buffer.strip().removeprefix(TAG)
        scan = scan_object(body)
        name = scan.values.get("name")
        key = "parameters" if "parameters" in scan.spans else "arguments"
        if not isinstance(name, str) or not name.strip() or key not in scan.spans:
            return self._release()
        start, end = scan.spans[key]
        rest = body[end:] if scan.end is None else body[scan.end :]
        arguments = body[start:end].rstrip()
        if rest.strip() or not arguments:
            return self._release()
        self._buffer = ""
        return call_deltas(0, name, arguments, self._new_id())

    def _release(self) -> list[Delta]:
        text, self._buffer = self._buffer, ""
        return [TextDelta(text)] if text else []


def _looks_like_call(text: str) -> bool | None:
    """Whether a reply that begins like this is held as a call; ``None`` if it is too early to say."""
    word = text.lstrip()
    if word.startswith(TAG):
        word = word[len(TAG) :].lstrip()
    elif TAG.startswith(word):
        return None
    match = _BEGINNING.match(word) if word else None
    if match is None:
        return False if word else None
    key, closed = match.group(1), match.group(2)
    if closed:
        return key in _KEYS
    may_go_on = match.end() == len(word) and any(name.startswith(key or "") for name in _KEYS)
    return None if may_go_on else False
