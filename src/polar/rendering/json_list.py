"""Tool calls as a JSON list: ``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`` (Nemotron Nano).

A closing tag inside a JSON string is text. What stands behind the last call that can be told apart is text.
"""

from __future__ import annotations

import re

from polar.rendering.blocks import Block, BlockParser, Call
from polar.rendering.hermes import call_of
from polar.rendering.jsonscan import in_string, scan_object

_NO_LIST = re.compile(r"\s*[^\s\[]|\s*\[\s*[^\s{]")
_BEFORE_FIRST = re.compile(r"\s*\[\s*")
_BETWEEN = re.compile(r"\s*,\s*")
_END = re.compile(r"\s*\]")


class JsonListParser(BlockParser):
    """Reads blocks that hold a list of call objects."""

    open, close = "<TOOLCALL>", "</TOOLCALL>"

    def is_text(self, text: str, start: int) -> bool:
        """A list begins with a bracket, and holds objects."""
        return _NO_LIST.match(text, start) is not None

    def ends(self, body: str) -> bool:
        """A closing tag ends the block unless it stands in a string."""
        return not in_string(body)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The calls of the list."""
        return listed_calls(body, closed=closed)


def listed_calls(body: str, *, closed: bool) -> Block:
    """The calls of the list at the start of ``body``, as far as they can be read."""
    begin = _BEFORE_FIRST.match(body)
    calls: list[Call] = []
    place = begin.end() if begin else len(body)
    length = 0
    while place < len(body):
        rest = body[place:]
        scan = scan_object(rest)
        if scan.end is None:
            rest = rest.rstrip().removesuffix("]") if closed else rest
            call = call_of(rest, scan_object(rest), closed=closed)
            return Block(len(body), (*calls, call)) if call else Block(length, tuple(calls))
        call = call_of(rest[: scan.end], scan, closed=True)
        if call is None:
            return Block(length, tuple(calls))
        call_id = scan.values.get("id")
        calls.append(call._replace(id=call_id if isinstance(call_id, str) else None))
        length = place = place + scan.end
        between = _BETWEEN.match(body, place)
        if between is None:
            end = _END.match(body, place)
            place = end.end() if end else place
            return Block(place if body[place:].strip() else len(body), tuple(calls))
        place = between.end()
    return Block(length or len(body), tuple(calls))
