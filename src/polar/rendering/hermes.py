"""Tool calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

Whitespace: of the whitespace before a call one line end belongs to the markup (templates write it), all of
it where there is no other text; after a call, whitespace is markup unless text follows. A call may lack its
closing tag at the end of the reply or before the next call. A closing tag inside a JSON string is text. Of a
whole object only the name and the arguments are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from polar.contract.chat import Delta, TextDelta
from polar.rendering.jsonscan import Scan, in_string, scan_object
from polar.rendering.parsers import NewId, call_deltas, held

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_NO_OBJECT = re.compile(r"\s*[^\s{]")
_UNCLOSED = re.compile(rf"[\s}}]*(?={OPEN})")


class HermesParser:
    """Reads ``<tool_call>`` blocks; a block is given out when it is whole."""

    def __init__(self, new_id: NewId) -> None:
        self._new_id = new_id
        self._buffer = ""
        self._calls = 0
        self._spoken = False  # text was given out since the start or the last call
        self._gap = ""  # whitespace just before the block at the start of the buffer
        self._from = 0  # in a block: where to look for the next closing tag

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
            if _NO_OBJECT.match(self._buffer, len(OPEN)):
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
            if not in_string(self._buffer[begin:close]):
                return close + len(CLOSE)
            self._from = close + len(CLOSE)
            close = self._buffer.find(CLOSE, self._from)
        if not final:
            self._from = max(begin, self._from, len(self._buffer) - len(CLOSE) + 1)
            return None
        close = self._buffer.find(CLOSE)
        return close + len(CLOSE) if close >= 0 else len(self._buffer)

    def _block(self, end: int) -> Iterator[Delta]:
        block = self._buffer[:end]
        self._from = 0
        closed = block.endswith(CLOSE)
        body = block[len(OPEN) : len(block) - (len(CLOSE) if closed else 0)]
        scan = scan_object(body)
        cut = _next_call(body, scan)
        if cut is not None:
            end = len(OPEN) + cut
            body, block, closed = body[:cut], block[:end], True
        self._buffer = self._buffer[end:]
        call = _call(body, scan, closed)
        if call is None:
            yield from self._visible(block)
            return
        if self._spoken:
            yield from self._text(self._gap.removesuffix("\n"))
        self._gap = ""
        yield from call_deltas(self._calls, *call, self._new_id)
        self._calls += 1
        self._spoken = False


def _next_call(body: str, scan: Scan) -> int | None:
    """Where the next call begins, if this one was not closed before it."""
    end = scan.end
    if end is None:
        whole = [span[1] for key, span in scan.spans.items() if scan.whole(key)]
        end = max(whole, default=0)
    match = _UNCLOSED.match(body, end) if end else None
    return match.end() if match else None


def _call(body: str, scan: Scan, closed: bool) -> tuple[str, str] | None:
    """Name and raw arguments; ``None`` where they can't be told apart."""
    name = scan.values.get("name")
    if not isinstance(name, str) or not name.strip():
        return None
    key = "arguments" if "arguments" in scan.spans else "parameters"
    if scan.end is not None and not body[scan.end :].strip():
        start, end = scan.spans.get(key, (0, 0))
        return name, body[start:end]
    # Broken. The arguments are what stands after their key, less the object's own closing brace.
    if key not in scan.spans or scan.spans["name"] > scan.spans[key]:
        return None
    start, end = scan.spans[key]
    if body[end:].strip() in ("", "}") and scan.whole(key):
        return name, body[start:end]
    raw = body[start:].rstrip()
    if closed:
        raw = raw.removesuffix("}").rstrip()
    return (name, raw) if raw else None
