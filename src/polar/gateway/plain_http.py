"""Why: a client may offer to go on in another protocol (``Upgrade: h2c``, as Java's HttpClient does, or a WebSocket),
which a server is free to pass over. The HTTP parser takes the offer for the end of the request and drops its body.
Here such a request is read again without the offer, so it is served like any other.

And a client may mean harm: a head that never ends would fill the memory, a connection that never asks for anything
would hold a file of the process for ever, and enough of them all of its files. So heads have a size and a time, and
a sandbox's listener a number of connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_OFFER = (b"upgrade", b"http2-settings")
LARGEST_HEAD = 256 * 1024
"""Bytes that may come without being a whole head, or a piece of a body."""
HEAD_SECONDS = 60.0
"""So long may a head take to come, from the connection on."""


@dataclass(slots=True)
class Room:
    """Connections of one listener: how many there are, and how many there may be."""

    most: int
    taken: int = 0


class PlainHttpProtocol(HttpToolsProtocol):
    """One connection that speaks HTTP/1.1 whatever its client offers.

    Args:
        room: of its listener; ``None``: no limit.
    """

    def __init__(self, *, room: Room | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._room = room
        self._unparsed = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if self._room is not None:
            self._room.taken += 1
            if self._room.taken > self._room.most:
                self._refuse(503, "too many connections")
                return
        self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        if self._room is not None:
            self._room.taken -= 1
        self._parsed()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._unparsed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if self.scope["method"] == "CONNECT":
                self.send_400_response("This is no proxy.")
                return
            again = self._without_offer() + data[offered.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(again)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._unparsed > LARGEST_HEAD:
            self._refuse(431, "the head of the request is too large")
        elif self._unparsed and self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def on_headers_complete(self) -> None:
        """A whole head."""
        self._parsed()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._parsed()
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._parsed()
        super().on_message_complete()

    def _parsed(self) -> None:
        self._unparsed = 0
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)  # an answer is on its way
        else:
            self._refuse(408, "no request came")

    def _refuse(self, status: int, why: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(why)
            self.transport.write(STATUS_LINE[status] + head + why.encode())
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Start no request for a head with an offer: the head without it comes next."""
        return True

    def _without_offer(self) -> bytes:
        lines = [self.scope["method"].encode() + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [word for word in value.split(b",") if word.strip().lower() not in _OFFER]
                value = b",".join(kept)
            if name not in _OFFER and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])
