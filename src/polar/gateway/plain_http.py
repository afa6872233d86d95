"""Why: a client may offer to go on in another protocol (``Upgrade: h2c``, as Java's HttpClient does, or a WebSocket),
which a server is free to pass over. The HTTP parser takes the offer for the end of the request and drops its body.
Here such a request is read again without the offer, so it is served like any other.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_OFFER = (b"upgrade", b"http2-settings")


class PlainHttpProtocol(HttpToolsProtocol):
    """One connection that speaks HTTP/1.1 whatever its client offers."""

    def data_received(self, data: bytes) -> None:
        """Bytes of requests."""
        self._unset_keepalive_if_required()
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
