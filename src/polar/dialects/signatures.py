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
_LIMIT = 64 * 1024 * 1024
"""Bytes of a signature's content: more would be a bomb, not a thought."""


class Signed(NamedTuple):
    """What a signature says."""

    call_id: str | None = None
    reasoning: str | None = None


def signature(call_id: str | None, reasoning: str | None) -> str:
    """A signature in base64, never empty."""
    return base64.b64encode(_MARK + zlib.compress(orjson.dumps([call_id, reasoning or None]))).decode()


def read_signature(text: str | None) -> Signed:
    """What one of ours says; nothing, if it is another's."""
    if not text:
        return Signed()
    try:
        data = base64.b64decode(text.translate(STANDARD_BASE64), validate=True)
        if not data.startswith(_MARK):
            return Signed()
        inflate = zlib.decompressobj()
        content = inflate.decompress(data[len(_MARK) :], _LIMIT)
        if not inflate.eof:
            return Signed()
        return Signed(*msgspec.json.decode(content, type=tuple[str | None, str | None]))
    except (ValueError, zlib.error):
        return Signed()
