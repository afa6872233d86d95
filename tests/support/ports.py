"""Ports for servers that must be told theirs. The system's own choice (port 0) is not good for that: between the
question and the server's start it may give the same port away again, to another test or to any outgoing connection,
and so it may while a server that was killed is started anew."""

from __future__ import annotations

import secrets
import socket

FIRST, COUNT = 20_000, 12_000  # above what Ray takes for its workers, below what Linux gives away by itself


def free_port() -> int:
    """A port on which nothing listens, and which hardly anybody else will take: it is one of thousands by chance."""
    while True:
        port = FIRST + secrets.randbelow(COUNT)
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return port
