"""Tool calls as GLM-4.5 and later write them: ``<tool_call>NAME``, then ``<arg_key>`` and ``<arg_value>`` pairs with
bare values, with line ends between them (4.5, 4.6) or without (4.7).

The arguments are made of the pairs, values typed by the tool's schema. A closing tag inside a value is text.
Arguments that were cut short are left without their closing brace. A name alone is a call only of a tool that
there is: anything else between the tags is a quotation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from polar.contract.chat import Tool
from polar.rendering.blocks import OPEN, Block, BlockParser, Call
from polar.rendering.parsers import NewId
from polar.rendering.values import Values

_NAME = re.compile(r"\s*([^\s<>{}\[\]][^<>{}\[\]\n]*)\s*")
_ARGUMENT = re.compile(r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>")
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_ENDED = re.compile(rf"{_END_VALUE}\s*(?=<arg_key>|<tool_call>|\Z)")


class GlmParser(BlockParser):
    """Reads blocks that hold a name and its key-value pairs."""

    def __init__(self, new_id: NewId, tools: Sequence[Tool]) -> None:
        super().__init__(new_id)
        self._values = Values(tools)

    def is_text(self, text: str, start: int) -> bool:
        """A call begins with a name."""
        word = text[start : start + 256].lstrip()
        return word[:1] in tuple("<>{}[]")

    def ends(self, body: str) -> bool:
        """A closing tag ends the block unless a value is open."""
        return body.rfind(_VALUE) <= body.rfind(_END_VALUE)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The name and its pairs as JSON."""
        begin = _NAME.match(body)
        if begin is None:
            return Block(len(body))
        name, place = begin.group(1).strip(), begin.end()
        arguments: dict[str, Any] = {}
        whole = True
        while whole and (argument := _ARGUMENT.match(body, place)) and argument.group(1).strip() not in arguments:
            end = _ENDED.search(body, argument.end())
            text = body[argument.end() : end.start() if end else len(body)]
            place, whole = (end.end(), True) if end else (len(body), False)
            key = argument.group(1).strip()
            arguments[key] = self._values.typed(name, key, text)
        if not arguments and (body[place:] or not closed or not self._values.knows(name)):
            return Block(len(body))
        raw = json.dumps(arguments, ensure_ascii=False)
        ended = whole and (body.startswith(OPEN, place) or (closed and place == len(body)))
        return Block(place, (Call(name, raw if ended else raw[:-1]),))
