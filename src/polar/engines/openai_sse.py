"""Why: bytes arrive as the network cut them, not as the server wrote them. Server-sent events are put back
together here, by lines, before anything looks at text.
"""

from __future__ import annotations


class EventReader:
    """Splits a byte stream into the data of its events. Comments and fields other than ``data`` are skipped;
    lines end in LF or CRLF."""

    def __init__(self) -> None:
        self._open: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """More bytes; the data of every event that is complete now."""
        if b"\n" not in piece:
            self._open.append(piece)
            return []
        self._open.append(piece)
        *lines, rest = b"".join(self._open).split(b"\n")
        self._open = [rest] if rest else []
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    def end(self) -> list[bytes]:
        """The stream is over: an event that lacks only its last blank line still counts."""
        events = self.feed(b"\n\n") if self._open or self._data else []
        self._open, self._data = [], []
        return events
