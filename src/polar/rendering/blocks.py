"""Streaming text with tool-call blocks in it; what stands in a block is the family's affair.

Whitespace: of the whitespace before a call that which the templates write there (``gap``) belongs to the
markup, all of it where there is no other text; after a call, whitespace is markup unless text follows. A block
may lack its closing tag at the end of the reply or before the next call. A block is given out when it is whole;
what a block holds behind its last call is text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from polar.contract.chat import Delta, TextDelta
from polar.rendering.parsers import NewId, call_deltas, held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Call(NamedTuple):
    """A call as it was sampled: its name, the raw text of its arguments, and its id, if the model wrote one that
    can be kept."""

    name: str
    arguments: str
    id: str | None = None


class Block(NamedTuple):
    """What a block's body says: how much of it (all, unless something else begins in it), and its calls (none: it
    is no call, and the whole block is text)."""

    length: int
    calls: tuple[Call, ...] = ()


class BlockParser(ABC):
    """A ``Parser`` of text and blocks. A family says how its blocks begin and end and what they mean.

    ``open`` begins a block and ``close`` ends it (empty: it ends where the next one begins); ``gap`` is what the
    templates write between text and the first block.
    """

    open = OPEN
    close = CLOSE
    gap = "\n"

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._calls = 0
        self._spoken = False  # text was given out since the start or the last call
        self._gap = ""  # whitespace just before the block at the start of the buffer
        self._from = 0  # in a block: where to look for the next closing tag

    @abstractmethod
    def is_text(self, text: str, start: int) -> bool:
        """Whether what follows an opening tag can't be a call any more."""

    @abstractmethod
    def ends(self, body: str) -> bool:
        """Whether a closing tag after ``body`` ends the block; otherwise it is part of an argument."""

    @abstractmethod
    def read_block(self, body: str, *, closed: bool) -> Block:
        """The calls in a block's body; ``closed``: its closing tag was there."""

    def feed(self, text: str) -> list[Delta]:
        """More text."""
        self._buffer += text
        return list(self._drain(final=False))

    def finish(self) -> list[Delta]:
        """The end of the text."""
        return list(self._drain(final=True))

    def _drain(self, *, final: bool) -> Iterator[Delta]:
        while self._buffer:
            start = self._buffer.find(self.open)
            if start < 0:
                yield from self._tail(final)
                return
            if start > 0:
                text = self._buffer[:start].rstrip()
                self._gap = self._buffer[len(text) : start]
                self._buffer = self._buffer[start:]
                yield from self._text(text)
            if self.is_text(self._buffer, len(self.open)):
                self._buffer = self._buffer[len(self.open) :]
                yield from self._visible(self.open)
                continue
            end = self._block_end(final)
            if end is None:
                return
            yield from self._block(end)

    def _tail(self, final: bool) -> Iterator[Delta]:
        """Text with no block in sight: all but what may yet be markup or the whitespace before it."""
        buffer = self._buffer
        if final:
            keep = len(buffer) if buffer.strip() or self._spoken or not self._calls else 0
            self._buffer = ""
        else:
            keep = len(buffer[: len(buffer) - held(buffer, self.open)].rstrip())
            self._buffer = buffer[keep:]
        yield from self._text(buffer[:keep])

    def _visible(self, markup: str) -> Iterator[Delta]:
        """Markup that is no call: text, with the whitespace before it."""
        gap, self._gap = self._gap, ""
        yield from self._text(gap + markup)

    def _text(self, text: str) -> Iterator[Delta]:
        if text:
            self._spoken = True
            yield TextDelta(text)

    def _block_end(self, final: bool) -> int | None:
        """Where the block at the start of the buffer ends, closing tag included; ``None``: not yet known."""
        begin, mark = len(self.open), self.close or self.open
        place = self._buffer.find(mark, max(begin, self._from))
        while place >= 0:
            if self.ends(self._buffer[begin:place]):
                return place + len(self.close)
            self._from = place + len(mark)
            place = self._buffer.find(mark, self._from)
        if not final:
            self._from = max(begin, self._from, len(self._buffer) - len(mark) + 1)
            return None
        place = self._buffer.find(self.close, begin) if self.close else -1
        return place + len(self.close) if place >= 0 else len(self._buffer)

    def _block(self, end: int) -> Iterator[Delta]:
        self._from = 0
        closed = self._buffer.endswith(self.close, len(self.open), end) if self.close else end < len(self._buffer)
        body = self._buffer[len(self.open) : end - (len(self.close) if closed else 0)]
        length, calls = self.read_block(body, closed=closed)
        if length < len(body):
            end = len(self.open) + length
        block, self._buffer = self._buffer[:end], self._buffer[end:]
        if not calls:
            yield from self._visible(block)
            return
        if self._spoken:
            yield from self._text(self._gap.removesuffix(self.gap))
        self._gap = ""
        for call in calls:
            yield from call_deltas(self._calls, call.name, call.arguments, call.id or self._new_id())
            self._calls += 1
        self._spoken = False
