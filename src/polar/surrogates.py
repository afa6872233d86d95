"""Half an emoji in JSON: JavaScript programs write one (as ``\\ud83d``) where they cut a string in the middle of a
character. It is no text, and strict parsers refuse the whole body for it, over and over, as it is history by then."""

from __future__ import annotations

import re

_ESCAPES = re.compile(rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def mend_surrogates(body: bytes) -> bytes:
    """The body with each escape that is half a character replaced by U+FFFD; nothing else is touched."""
    return _ESCAPES.sub(lambda match: b"\\ufffd" if _HALF.fullmatch(match[0]) else match[0], body)
