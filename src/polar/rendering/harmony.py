"""Replies as gpt-oss writes them: several messages one after the other, each with a header that names its channel.

``<|channel|>analysis`` is thinking, ``final`` and ``commentary`` are visible text, and a message addressed
``to=functions.NAME`` is a call whose body is the raw arguments. Everything streams: a header is held back until
it is whole, of a body only what may be the token that ends it. Text without a header is visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from polar.contract.chat import Delta, ReasoningDelta, TextDelta, Tool, ToolCallDelta
from polar.rendering.parsers import NewId, held

INNER_END = "<|end|>"
"""Ends a message, but not the reply."""

_MESSAGE = "<|message|>"
_ENDS = (INNER_END, "<|call|>", "<|return|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", "assistant", " to=", "to=")
_LONGEST = 256
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?: ?to=([^\s<]+))?"  # addressed before the channel is named, or after it
    r"(?:<\|channel\|>(analysis|commentary|final)(?: to=([^\s<]+))?)?"
    r"\s*(?:<\|constrain\|>)?\s*[A-Za-z]*\s*"
)


class HarmonyParser:
    """Reads the messages of one reply. Without ``tools`` a call is text."""

    def __init__(self, new_id: NewId, tools: Sequence[Tool]) -> None:
        self._new_id = new_id
        self._tools = bool(tools)
        self._buffer = ""
        self._kind = ""  # of the body that is being read; empty: a header
        self._calls = 0
        self._said = {"text": False, "thought": False}
        self._new = False  # nothing of this body was given out yet

    def feed(self, text: str) -> list[Delta]:
        """More text."""
        self._buffer += text
        return list(self._drain())

    def finish(self) -> list[Delta]:
        """The end of the text: a header that never ended is text."""
        out = list(self._drain())
        rest, self._buffer = self._buffer, ""
        if rest and not self._kind:
            self._begin("text")
        return [*out, *self._give(rest)]

    def _drain(self) -> Iterator[Delta]:
        while self._buffer:
            if not self._kind:
                if _undecided(self._buffer):
                    return
                yield from self._header()
                continue
            places = [(place, end) for end in _ENDS if (place := self._buffer.find(end)) >= 0]
            if not places:
                keep = max(held(self._buffer, end) for end in _ENDS)
                cut = len(self._buffer) - keep
                body, self._buffer = self._buffer[:cut], self._buffer[cut:]
                yield from self._give(body)
                return
            place, end = min(places)
            body, self._buffer = self._buffer[:place], self._buffer[place + len(end) :]
            yield from self._give(body)
            self._kind = ""

    def _header(self) -> Iterator[Delta]:
        """Take the header off the buffer; text without one is a body as it stands."""
        header, found, rest = self._buffer.partition(_MESSAGE)
        parts = _HEADER.fullmatch(header) if found and _is_header(header) else None
        if parts is None:
            self._begin("text")
            return
        self._buffer = rest
        recipient, channel = parts.group(1) or parts.group(3), parts.group(2)
        if recipient is None:
            self._begin("thought" if channel == "analysis" else "text")
            return
        name = recipient.removeprefix("functions.")
        if self._tools and name:
            self._begin("call")
            yield ToolCallDelta(index=self._calls, id=self._new_id(), name=name)
            self._calls += 1
        else:
            self._begin("text")
            yield from self._give(header + _MESSAGE)

    def _begin(self, kind: str) -> None:
        self._kind, self._new = kind, True

    def _give(self, text: str) -> Iterator[Delta]:
        if not text:
            return
        if self._kind == "call":
            yield ToolCallDelta(index=self._calls - 1, arguments=text)
            return
        if self._new and self._said[self._kind]:
            text = "\n\n" + text
        self._new, self._said[self._kind] = False, True
        yield ReasoningDelta(text) if self._kind == "thought" else TextDelta(text)


def _undecided(text: str) -> bool:
    """Whether text may be the beginning of a header whose end is not there yet."""
    if any(word.startswith(text) for word in _BEGINNINGS):
        return True
    return _MESSAGE not in text and len(text) < _LONGEST + len(_MESSAGE) and _may_be_header(text)


def _is_header(text: str) -> bool:
    return len(text) <= _LONGEST and _may_be_header(text)


def _may_be_header(text: str) -> bool:
    return text.startswith(_BEGINNINGS) and "\n" not in text and not any(end in text for end in _ENDS)
