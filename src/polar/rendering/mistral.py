"""Tool calls as Mistral writes them behind ``[TOOL_CALLS]``: a JSON list (Nemo), or a name, ``[ARGS]`` and JSON, with
or without ``[CALL_ID]`` (Small 3.2, Devstral, Ministral 3).

There is no closing tag: a block ends with its JSON, and text may follow. Ids that the model writes are kept, since
the template refers to them in the results; they are nine letters and digits.
"""

from __future__ import annotations

import re

from polar.rendering.blocks import Block, BlockParser, Call
from polar.rendering.json_list import listed_calls
from polar.rendering.jsonscan import in_string, scan_object

_NO_LIST = re.compile(r"\[\s*[^\s{]")
_WORD = re.compile(r"[^\s\[\]{}]+")
_HEAD = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\]([A-Za-z0-9]*))?\[ARGS\]")
_ID = re.compile(r"[A-Za-z0-9]{9}")


class MistralParser(BlockParser):
    """Reads lists and single calls."""

    open, close, gap = "[TOOL_CALLS]", "", ""

    def is_text(self, text: str, start: int) -> bool:
        """A block begins with a list of objects, or with a name and the tag behind it."""
        word = text[start : start + 256].lstrip()
        if not word:
            return False
        if word[0] == "[":
            return _NO_LIST.match(word) is not None
        name = _WORD.match(word)
        if name is None:
            return True
        rest = word[name.end() :]
        return not any(tag.startswith(rest[: len(tag)]) for tag in ("[ARGS]", "[CALL_ID]"))

    def ends(self, body: str) -> bool:
        """The next block begins, unless its tag stands in a string."""
        head = _HEAD.match(body)
        return not in_string(body[head.end() :] if head else body)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The calls of a list, or the one call."""
        head = _HEAD.match(body)
        if head is None:
            length, calls = listed_calls(body, closed=closed)
            return Block(length, tuple(call._replace(id=_known(call.id)) for call in calls))
        rest = body[head.end() :]
        end = scan_object(rest).end
        length = len(body) if end is None or not rest[end:].strip() else head.end() + end
        arguments = body[head.end() : length].strip()
        return Block(length, (Call(head.group(1), arguments, _known(head.group(2))),) if arguments else ())


def _known(call_id: str | None) -> str | None:
    return call_id if call_id and _ID.fullmatch(call_id) else None
