"""Tool calls as MiniMax M2 and DeepSeek V3.2 and V4 write them: a section of ``<invoke name="NAME">`` elements with
``<parameter name="KEY">`` in them and bare values.

DeepSeek writes a mark into every tag and says of each value whether it is a string; otherwise the tool's schema
says it. What stands in a section behind its last whole call is text. Arguments that were cut short are left
without their closing brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from polar.contract.chat import Tool
from polar.rendering.blocks import Block, BlockParser, Call
from polar.rendering.parsers import NewId
from polar.rendering.values import Values, json_or_text


class InvokeParser(BlockParser):
    """Reads a section of elements.

    Args:
        section: the name of the section's tag.
        gap: what the template writes between text and the section.
        mark: what stands before the name in every tag within the section.
    """

    def __init__(self, new_id: NewId, tools: Sequence[Tool], *, section: str, gap: str, mark: str = "") -> None:
        super().__init__(new_id)
        self.open, self.close, self.gap = f"<{section}>", f"</{section}>", gap
        self._values = Values(tools)
        self._beginning = f'<{mark}invoke name="'
        self._end = f"</{mark}invoke>"
        self._invoke = re.compile(rf'\s*<{mark}invoke name="([^"<>\n]+)">\s*')
        self._parameter = re.compile(rf'<{mark}parameter name="([^"<>\n]+)"(?: string="(true|false)")?>')
        self._end_value = re.compile(rf"</{mark}parameter>\s*(?=<{mark}parameter name=|{self._end}|\Z)")

    def is_text(self, text: str, start: int) -> bool:
        """A section begins with an element."""
        word = text[start : start + 256].lstrip()[: len(self._beginning)]
        return not self._beginning.startswith(word)

    def ends(self, body: str) -> bool:
        """A closing tag ends the section where an element has ended; before, it may stand in a value."""
        return body.rstrip().endswith(self._end)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The elements, as far as they can be read."""
        calls: list[Call] = []
        place = 0
        while begin := self._invoke.match(body, place):
            name = begin.group(1).strip()
            arguments, end, whole = self._arguments(name, body, begin.end())
            ended = body.startswith(self._end, end)
            if not name or (body[end:] and not ended) or not (ended or arguments):
                break
            raw = json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(name, raw if ended or (closed and whole) else raw[:-1]))
            place = end + (len(self._end) if ended else 0)
        return Block(place if body[place:].strip() else len(body), tuple(calls))

    def _arguments(self, name: str, body: str, place: int) -> tuple[dict[str, Any], int, bool]:
        """The parameters from ``place`` on, where they end, and whether the last one was closed."""
        arguments: dict[str, Any] = {}
        while parameter := self._parameter.match(body, place):
            key, string = parameter.group(1).strip(), parameter.group(2)
            if key in arguments:
                break
            end = self._end_value.search(body, parameter.end())
            text = body[parameter.end() : end.start() if end else len(body)]
            if string is None:
                arguments[key] = self._values.typed(name, key, text)
            else:
                arguments[key] = text if string == "true" else json_or_text(text)
            if end is None:
                return arguments, len(body), False
            place = end.end()
        return arguments, place, True


def minimax(new_id: NewId, tools: Sequence[Tool]) -> InvokeParser:
    """MiniMax M2."""
    return InvokeParser(new_id, tools, section="minimax:tool_call", gap="\n")


def deepseek_v32(new_id: NewId, tools: Sequence[Tool]) -> InvokeParser:
    """DeepSeek V3.2."""
    return InvokeParser(new_id, tools, section="｜DSML｜function_calls", gap="\n\n", mark="｜DSML｜")


def deepseek_v4(new_id: NewId, tools: Sequence[Tool]) -> InvokeParser:
    """DeepSeek V4."""
    return InvokeParser(new_id, tools, section="｜DSML｜tool_calls", gap="\n\n", mark="｜DSML｜")
