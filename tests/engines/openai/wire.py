"""Why: some faults are below HTTP's good manners (a connection cut at a given byte, one that dies while idle).
A server of raw bytes: each POST gets the next ``Reply`` from a list, written exactly as given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

MODELS = {"id": "m", "object": "model", "owned_by": "vllm", "root": "/models/m", "max_model_len": 2048}


@dataclass(frozen=True)
class Reply:
    """An HTTP reply: pieces written one after the other, each on the wire before the next."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    cut: bool = False
    """Close the connection after the last piece, without ending the body."""
    early: bool = False
    """Do it with only the request's head read: a connection reset, if there is much more."""
    raw: bytes | None = None
    """These bytes instead of a whole reply; then the connection closes."""


def sse(*events: Any, done: bool = True) -> bytes:
    """Events as a server writes them."""
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return b"".join(lines) + (b"data: [DONE]\n\n" if done else b"")


def whole(value: Any, status: int = 200) -> Reply:
    return Reply([value if isinstance(value, bytes) else json.dumps(value).encode()], status)


@dataclass
class Wire:
    """A running server: what it will answer, and what it has seen."""

    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    models: dict[str, Any] = field(default_factory=lambda: {"data": [MODELS]})
    models_status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    resets: int = 0
    keep_alive: bool = True
    """Whether the connection goes on after GET."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        is_get = head[0].startswith("GET")
        if not is_get and self.replies[0].early:
            self.resets += 1
            return await _write(writer, self.replies.pop(0))
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if is_get:
            found = self.models if "/v1/models" in head[0] else {}
            return await _write(writer, whole(found, self.models_status), keep_alive=self.keep_alive)
        self.bodies.append(json.loads(body))
        self.headers.append(headers)
        return await _write(writer, self.replies.pop(0))


async def _write(writer: asyncio.StreamWriter, reply: Reply, *, keep_alive: bool = True) -> bool:
    if reply.raw is not None:
        writer.write(reply.raw)
        return False
    writer.write(f"HTTP/1.1 {reply.status} X\r\nTransfer-Encoding: chunked\r\n".encode())
    writer.write(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    for piece in reply.pieces:
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        await writer.drain()
        await asyncio.sleep(0)
    if reply.cut:
        return False
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return keep_alive


@asynccontextmanager
async def wire_server(*replies: Reply) -> AsyncIterator[Wire]:
    wire = Wire(replies=list(replies))
    server = await asyncio.start_server(wire.serve, "127.0.0.1", 0)
    wire.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield wire
    finally:
        server.close()
