"""Why: where an API signs its thinking, clients may drop the text and still return every signature where it stood.
So ours holds what they would lose: the thinking, and for a function call the id that it is recorded under. Read back,
two replies that differ in their thinking only are told apart, and thinking is kept where the record can't help (a
conversation that was compacted or moved to another session). A signature that isn't ours is passed over. Nothing is
trusted: a client could as well send the thought itself.
"""

from __future__ import annotations

import base64
import zlib
from typing import NamedTuple

import msgspec
import orjson

STANDARD_BASE64 = str.maketrans("-_", "+/")
"""From the URL-safe alphabet, which Google's Python SDK writes."""
_MARK = b"\x0apolar"
_MOST = 16
"""How many times as long as a signature its content may be: a small body must not become gigabytes."""


class Signed(NamedTuple):
    """What a signature says."""

    call_id: str | None = None
    reasoning: str | None = None


def signature(call_id: str | None, reasoning: str | None) -> str:
    """A signature in base64, never empty."""
    content = orjson.dumps([call_id, reasoning or None])
    packed = zlib.compress(content)
    if len(content) > _MOST * len(packed):  # a thought that went in circles
        packed = zlib.compress(content, level=0)
    return base64.b64encode(_MARK + packed).decode()


def read_signature(text: str | None) -> Signed:
    """What one of ours says; nothing, if it is another's."""
    if not text:
        return Signed()
    try:
        data = base64.b64decode(text.translate(STANDARD_BASE64), validate=True)
        if not data.startswith(_MARK):
            return Signed()
        inflate = zlib.decompressobj()
        content = inflate.decompress(data[len(_MARK) :], _MOST * len(data))
        if not inflate.eof:
            return Signed()
        return Signed(*msgspec.json.decode(content, type=tuple[str | None, str | None]))
    except (ValueError, zlib.error):
        return Signed()
