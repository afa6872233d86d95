"""Tool calls as Qwen3-Coder and Qwen3.5 write them: ``<tool_call>`` around ``<function=NAME>`` and
``<parameter=KEY>`` with bare values.

There is no JSON in what is sampled, so the arguments are made: a value is JSON where the tool's schema says
that it is no string, and otherwise the text as it stands, less one line end on either side. Arguments that
were cut short are left without their closing brace: they must not pass for whole.
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

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
_END_VALUE, _END = "</parameter>", "</function>"
_BEGINNING = "<function="


class QwenXmlParser(BlockParser):
    """Reads blocks that hold one function with its parameters."""

    def __init__(self, new_id: NewId, tools: Sequence[Tool]) -> None:
        super().__init__(new_id)
        self._values = Values(tools)

    def is_text(self, text: str, start: int) -> bool:
        """A call begins with its function."""
        word = text[start : start + 256].lstrip()[: len(_BEGINNING)]
        return not _BEGINNING.startswith(word)

    def ends(self, body: str) -> bool:
        """A closing tag ends the block where the function has ended; before, it may stand in a value."""
        return body.rstrip().endswith(_END)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The function's name and its parameters as JSON."""
        start = _FUNCTION.match(body)
        if start is None:
            return Block(len(body))
        name, place = start.group(1).strip(), start.end()
        arguments: dict[str, Any] = {}
        whole = True
        while parameter := _PARAMETER.match(body, place):
            key = parameter.group(1).strip()
            if key in arguments:
                break
            end, place, whole = _value_end(body, parameter.end())
            arguments[key] = self._values.typed(name, key, _stripped(body[parameter.end() : end]))
        rest = body[place:]
        ended = rest.startswith(_END)
        rest = rest.removeprefix(_END)
        length = len(body)
        if ended and rest.lstrip().startswith(OPEN):
            length, rest = body.index(OPEN, place), ""
        if rest.strip() or not name or not (ended or closed or arguments):
            return Block(len(body))
        raw = json.dumps(arguments, ensure_ascii=False)
        return Block(length, (Call(name, raw if ended or (closed and whole) else raw[:-1]),))


def _value_end(body: str, start: int) -> tuple[int, int, bool]:
    """Where a value ends, where what follows begins, and whether its closing tag was there."""
    end = body.find(_END_VALUE, start)
    if end >= 0:
        after = end + len(_END_VALUE)
        return end, after + len(body[after:]) - len(body[after:].lstrip()), True
    end = body.rfind(_END, start)
    end = end if end >= 0 else len(body)
    return end, end, False


def _stripped(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
