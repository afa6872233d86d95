"""Tool calls as DeepSeek V3, R1 and V3.1 and Kimi K2 write them: a section of calls between control tokens, each a
head, a separator and JSON.

DeepSeek V3 and R1 write ``function`` before the separator, and the name and a fenced block behind it; V3.1 writes
the name before it; Kimi writes ``functions.NAME:NUMBER``. The arguments are the raw text as sampled. What stands
in a section behind its last call that can be told apart is text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from polar.rendering.blocks import Block, BlockParser, Call
from polar.rendering.jsonscan import scan_object
from polar.rendering.parsers import NewId

_FENCED = re.compile(r"\s*([^\s`{}]+)[ \t]*\n```(?:json)?\s*")
_NUMBERED = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)
_FENCE, _HEAD = "```", "function"


class Marks(NamedTuple):
    """The control tokens of a family: of the section, of a call, and between a call's head and its arguments;
    ``numbered``: the head is ``functions.NAME:NUMBER``."""

    open: str
    close: str
    begin: str
    separator: str
    end: str
    numbered: bool


_DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    numbered=False,
)
_KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    numbered=True,
)


class SectionParser(BlockParser):
    """Reads a section of calls between these marks."""

    gap = ""

    def __init__(self, new_id: NewId, marks: Marks) -> None:
        super().__init__(new_id)
        self.open, self.close = marks.open, marks.close
        self._marks = marks

    def is_text(self, text: str, start: int) -> bool:
        """A section begins with a call."""
        begin = self._marks.begin
        word = text[start : start + 256].lstrip()[: len(begin)]
        return not begin.startswith(word)

    def ends(self, body: str) -> bool:
        """A closing token ends the section where a call has ended."""
        return body.rstrip().endswith(self._marks.end)

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The calls, as far as they can be read."""
        calls: list[Call] = []
        place = 0
        while (found := self._call(body, place)) is not None:
            call, place = found
            calls.append(call)
        return Block(place if body[place:].strip() else len(body), tuple(calls))

    def _call(self, body: str, place: int) -> tuple[Call, int] | None:
        """The call at ``place``, and where it ends."""
        marks = self._marks
        place += len(body[place:]) - len(body[place:].lstrip())
        separator = body.find(marks.separator, place)
        if not body.startswith(marks.begin, place) or separator < 0:
            return None
        head = body[place + len(marks.begin) : separator]
        start = separator + len(marks.separator)
        name = head.strip()
        fenced = _FENCED.match(body, start) if name == _HEAD else None
        if fenced:
            name, start = fenced.group(1), fenced.end()
        elif marks.numbered and (numbered := _NUMBERED.fullmatch(name)):
            name = numbered.group(1)
        arguments, end = self._arguments(body, start, fenced is not None)
        if name == _HEAD and not arguments.startswith("{"):
            return None  # cut within the name
        if not name or marks.begin in head or marks.end in head or not (arguments or body.startswith(marks.end, end)):
            return None
        return Call(name, arguments), end + (len(marks.end) if body.startswith(marks.end, end) else 0)

    def _arguments(self, body: str, start: int, fenced: bool) -> tuple[str, int]:
        """The text of the arguments, and where they end: before the call's end if it is there."""
        scan = scan_object(body[start:])
        if scan.end is not None:
            end = start + scan.end
            rest = body[end:].lstrip()
            rest = rest.removeprefix(_FENCE).lstrip() if fenced else rest
            if not rest or rest.startswith(self._marks.end):
                return body[start:end].strip(), len(body) - len(rest)
        places = [place for mark in (self._marks.end, self._marks.begin) if (place := body.find(mark, start)) >= 0]
        end = min(places, default=len(body))
        text = body[start:end].strip()
        return text.removesuffix(_FENCE).rstrip() if fenced else text, end


def deepseek(new_id: NewId) -> SectionParser:
    """DeepSeek V3, R1 and V3.1."""
    return SectionParser(new_id, _DEEPSEEK)


def kimi(new_id: NewId) -> SectionParser:
    """Kimi K2."""
    return SectionParser(new_id, _KIMI)
