"""Tool calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A closing tag inside a JSON string is text. Of a whole object only the name and the arguments are kept.
"""

from __future__ import annotations

import re

from polar.rendering.blocks import OPEN, Block, BlockParser, Call
from polar.rendering.jsonscan import Scan, in_string, scan_object

_NO_OBJECT = re.compile(r"\s*[^\s{]")
_UNCLOSED = re.compile(rf"[\s}}]*(?={OPEN})")


class HermesParser(BlockParser):
    """Reads blocks that hold one JSON object."""

    def is_text(self, text: str, start: int) -> bool:
        """A call begins with a brace."""
        return _NO_OBJECT.match(text, start) is not None

    def ends(self, body: str) -> bool:
        """A closing tag ends the block unless it stands in a string."""
        return not in_string(body)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The object's name and the text of its arguments."""
        scan = scan_object(body)
        cut = _next_call(body, scan)
        length = len(body) if cut is None else cut
        call = call_of(body[:length], scan, closed=closed or cut is not None)
        return Block(length, (call,) if call else ())


def _next_call(body: str, scan: Scan) -> int | None:
    """Where the next call begins, if this one was not closed before it."""
    end = scan.end
    if end is None:
        whole = [span[1] for key, span in scan.spans.items() if scan.whole(key)]
        end = max(whole, default=0)
    match = _UNCLOSED.match(body, end) if end else None
    return match.end() if match else None


def call_of(body: str, scan: Scan, *, closed: bool) -> Call | None:
    """The call that the object in ``body`` is; ``None`` where name and arguments can't be told apart. ``closed``: it
    was ended on purpose, and a brace at the end is its own."""
    name = scan.values.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    key = "arguments" if "arguments" in scan.spans else "parameters"
    if scan.end is not None and not body[scan.end :].strip():
        start, end = scan.spans.get(key, (0, 0))
        return Call(name, body[start:end])
    # Broken. The arguments are what stands after their key, less the object's own closing brace.
    if key not in scan.spans or scan.spans["name"] > scan.spans[key]:
        return None
    start, end = scan.spans[key]
    if body[end:].strip() in ("", "}") and scan.whole(key):
        return Call(name, body[start:end])
    raw = body[start:].rstrip()
    if closed:
        raw = raw.removesuffix("}").rstrip()
    return Call(name, raw) if raw else None
