"""Streaming text with ``<tool_call>`` blocks in it; what stands in a block is the family's affair.

Whitespace: of the whitespace before a call one line end belongs to the markup (templates write it), all of
it where there is no other text; after a call, whitespace is markup unless text follows. A call may lack its
closing tag at the end of the reply or before the next call. A block is given out when it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from polar.contract.chat import Delta, TextDelta
from polar.rendering.parsers import NewId, call_deltas, held

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Block(NamedTuple):
    """What a block's body says: how much of it (all, unless another call begins in it), and the call, if it is
    one, as name and raw arguments."""

    length: int
    call: tuple[str, str] | None


class BlockParser:
    """A ``Parser`` of text and blocks. A family says how its blocks begin and end and what they mean."""

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._calls = 0
        self._spoken = False  # text was given out since the start or the last call
        self._gap = ""  # whitespace just before the block at the start of the buffer
        self._from = 0  # in a block: where to look for the next closing tag

    def is_text(self, text: str, start: int) -> bool:
        """Whether what follows an opening tag can't be a call any more."""
        raise NotImplementedError

    def ends(self, body: str) -> bool:
        """Whether a closing tag after ``body`` ends the block; otherwise it is part of an argument."""
        raise NotImplementedError

    def read_block(self, body: str, *, closed: bool) -> Block:
        """The call in a block's body; ``closed``: its closing tag was there."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Delta]:
        """More text."""
        self._buffer += text
        return list(self._drain(final=False))

    def finish(self) -> list[Delta]:
        """The end of the text."""
        return list(self._drain(final=True))

    def _drain(self, *, final: bool) -> Iterator[Delta]:
        while self._buffer:
            start = self._buffer.find(OPEN)
            if start < 0:
                yield from self._tail(final)
                return
            if start > 0:
                text = self._buffer[:start].rstrip()
                self._gap = self._buffer[len(text) : start]
                self._buffer = self._buffer[start:]
                yield from self._text(text)
            if self.is_text(self._buffer, len(OPEN)):
                self._buffer = self._buffer[len(OPEN) :]
                yield from self._visible(OPEN)
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
            keep = len(buffer[: len(buffer) - held(buffer, OPEN)].rstrip())
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
        begin = len(OPEN)
        close = self._buffer.find(CLOSE, max(begin, self._from))
        while close >= 0:
            if self.ends(self._buffer[begin:close]):
                return close + len(CLOSE)
            self._from = close + len(CLOSE)
            close = self._buffer.find(CLOSE, self._from)
        if not final:
            self._from = max(begin, self._from, len(self._buffer) - len(CLOSE) + 1)
            return None
        close = self._buffer.find(CLOSE)
        return close + len(CLOSE) if close >= 0 else len(self._buffer)

    def _block(self, end: int) -> Iterator[Delta]:
        self._from = 0
        closed = self._buffer.endswith(CLOSE, 0, end)
        body = self._buffer[len(OPEN) : end - (len(CLOSE) if closed else 0)]
        length, call = self.read_block(body, closed=closed)
        if length < len(body):
            end = len(OPEN) + length
        block, self._buffer = self._buffer[:end], self._buffer[end:]
        if call is None:
            yield from self._visible(block)
            return
        if self._spoken:
            yield from self._text(self._gap.removesuffix("\n"))
        self._gap = ""
        yield from call_deltas(self._calls, *call, self._new_id)
        self._calls += 1
        self._spoken = False
