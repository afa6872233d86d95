"""Where the members of a JSON object stand in a text that may be cut short or broken.

A JSON library gives values; a captured call needs the arguments' own text, and as much as can be told of
an object that no library accepts. Strings may hold raw line ends, which models write.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder(strict=False).raw_decode


class Scan(msgspec.Struct):
    """What was found. ``spans`` maps a key to where its value's text begins and ends; of a value that is not
    whole the end is the end of the text. ``values`` has the whole ones. ``end`` is the place after the
    object's closing brace, ``None`` if it never came."""

    spans: dict[str, tuple[int, int]] = {}
    values: dict[str, Any] = {}
    end: int | None = None

    def whole(self, key: str) -> bool:
        """Whether this key's value is whole."""
        return key in self.values


def scan_object(text: str) -> Scan:
    """The members of the object at the start of ``text``, as far as they can be read. Of a repeated key the
    last one counts."""
    scan = Scan()
    place = _skip(text, 0)
    if text[place : place + 1] != "{":
        return scan
    place = _skip(text, place + 1)
    if text[place : place + 1] == "}":
        scan.end = place + 1
        return scan
    while text[place : place + 1] == '"':
        next_place = _member(text, place, scan)
        if next_place is None:
            return scan
        place = _skip(text, next_place)
        if text[place : place + 1] == "}":
            scan.end = place + 1
            return scan
        if text[place : place + 1] != ",":
            return scan
        place = _skip(text, place + 1)
    return scan


def in_string(text: str) -> bool:
    """Whether the JSON in ``text`` breaks off inside a string."""
    try:
        _decode(text, _skip(text, 0))
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False


def _member(text: str, place: int, scan: Scan) -> int | None:
    """Read ``"key": value`` at ``place``; where it ends, or ``None`` if it is broken."""
    try:
        key, place = _decode(text, place)
        place = _skip(text, place)
        if text[place : place + 1] != ":":
            return None
        place = _skip(text, place + 1)
        scan.spans[key] = (place, len(text))
        scan.values.pop(key, None)
        value, end = _decode(text, place)
    except (ValueError, RecursionError):
        return None
    scan.spans[key] = (place, end)
    scan.values[key] = value
    return end


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place
