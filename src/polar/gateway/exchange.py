"""One HTTP exchange over ASGI: the request's parts, and writing that notices a client who has gone away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from polar.dialects.base import CallError, Response

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.query: dict[str, str] = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        self.started = False
        self._receive = receive
        self._send = send
        self._gone: asyncio.Task[None] | None = None

    def key(self) -> str | None:
        """The session key that the request carries, in any of the ways that SDKs have."""
        bearer = self.headers.get("authorization", "")
        if bearer[:7].lower() == "bearer " and bearer[7:].strip():
            return bearer[7:].strip()
        return self.headers.get("x-api-key") or self.headers.get("x-goog-api-key") or self.query.get("key")

    async def body(self, limit: int) -> bytes:
        """The whole request body, of ``limit`` bytes at most.

        Raises:
            CallError: ``too_large``.
            ClientGone: the client left before the end.
        """
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > limit:
                raise CallError("too_large", f"The request body is over {limit} bytes")
            if not message.get("more_body"):
                return b"".join(pieces) if len(pieces) > 1 else pieces[0]

    async def wait(self, future: asyncio.Future[Any], timeout: float | None = None) -> bool:
        """Wait for a future, ``timeout`` seconds at most; whether it is done.

        Raises:
            ClientGone: the client left first.
        """
        if self._gone is None:
            self._gone = asyncio.create_task(self._disconnect())
        await asyncio.wait({future, self._gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._gone.done() and not future.done():
            raise ClientGone
        return future.done()

    async def respond(self, response: Response) -> None:
        """A whole response."""
        headers = {"content-type": "application/json", "content-length": str(len(response.body))}
        await self.start(response.status, headers | dict(response.headers))
        await self.write(response.body, last=True)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers (again: no effect)."""
        if self.started:
            return
        self.started = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Bytes of the body; the last ones end the response.

        Raises:
            ClientGone: the client has left.
        """
        if self._gone is not None and self._gone.done():
            raise ClientGone
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def close(self) -> None:
        """Stop watching the connection."""
        if self._gone is not None:
            self._gone.cancel()

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
