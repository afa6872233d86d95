"""Why: one process uses one core, and a session lives in one process. Where several gateway workers share a port, the
kernel gives a connection to any of them, so each passes on what is a sibling's, before anything of it is read.

Whose a request is says its path (``/workers/{index}/...``: how the rollout server calls one worker) or its session
key (``sk-polar-{index}.{random}``: model calls). What says neither is served by whoever has it. Requests and replies
are passed on piece by piece as they come, once, and a connection that breaks on one side is broken on the other.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from polar.gateway.exchange import Exchange, Receive, Scope, Send

_PATH = re.compile(r"/workers/(\d{1,4})(?=/|$)")
_KEY = re.compile(r"sk-polar-(\d{1,4})\.")
_OF_ONE_CONNECTION = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
_AWAY = b'{"error": {"message": "The worker of this session is away: try again", "type": "overloaded_error"}}'
_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
"""Headers that the HTTP client would add."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place among its siblings.

    ``shared`` listens on the port of all, ``own`` on a loopback port of this worker; ``ports`` are the loopback ports
    of all of them, by index; ``url`` is the address of the shared port. Both sockets stay open in the supervisor, so
    what comes while a worker is started again waits.
    """

    index: int
    shared: socket.socket
    own: socket.socket
    ports: tuple[int, ...]
    url: str

    def url_for(self, public: str) -> str:
        """This worker's own address, under the address of all."""
        return f"{public}/workers/{self.index}"


class Siblings:
    """The ASGI app on the shared port.

    Args:
        app: what this worker serves.
    """

    def __init__(self, app: Any, place: Place) -> None:
        self._app = app
        self._place = place
        self._http: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of the connections to the siblings."""
        if self._http is not None:
            await self._http.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            return
        index, scope = _addressed(scope)
        if index is None:
            index = _owner(scope["path"], Exchange(scope, receive, send))
        if index is None or index == self._place.index or index >= len(self._place.ports):
            await self._app(scope, receive, send)
        else:
            await self._pass_on(scope, receive, send, self._place.ports[index])

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, port: int) -> None:
        sent = asyncio.Event()
        copying = asyncio.create_task(self._copy(scope, _body(receive, sent), send, port))
        watching = asyncio.create_task(_until_gone(receive, sent))
        try:
            await asyncio.wait({copying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if copying.done():
                copying.result()
        finally:
            # Where the client has gone this closes the connection to the sibling, which sees that it has gone.
            for task in (copying, watching):
                task.cancel()
            await asyncio.wait({copying, watching})

    async def _copy(self, scope: Scope, body: AsyncIterator[bytes], send: Send, port: int) -> None:
        started = False
        try:
            async with self._client().request(
                scope["method"],
                URL(f"http://127.0.0.1:{port}{_target(scope)}", encoded=True),
                headers=[(_text(name), _text(value)) for name, value in _kept(scope["headers"])],
                data=body if _has_body(scope["headers"]) else None,
                allow_redirects=False,
            ) as reply:
                headers = _kept(reply.raw_headers)
                await send({"type": "http.response.start", "status": reply.status, "headers": headers})
                started = True
                async for piece in reply.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (aiohttp.ClientError, OSError) as error:
            if started:
                raise ConnectionAbortedError from error
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_AWAY)).encode())]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": _AWAY, "more_body": False})

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
                skip_auto_headers=_ADDED,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http


def _addressed(scope: Scope) -> tuple[int | None, Scope]:
    """The worker that the path names, if it names one; and the request without that in its path."""
    named = _PATH.match(scope["path"])
    if named is None:
        return None, scope
    path, raw = scope["path"][named.end() :], scope["raw_path"][named.end() :]
    return int(named[1]), {**scope, "path": path or "/", "raw_path": raw or b"/"}


def _owner(path: str, exchange: Exchange) -> int | None:
    """The worker whose session's key the request carries."""
    found = _KEY.match((path[3:] if path.startswith("/s/") else exchange.key()) or "")
    return int(found[1]) if found else None


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path: str = scope["raw_path"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _kept(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without those that are about one connection only."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _OF_ONE_CONNECTION]


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") and value != b"0" for name, value in headers)


async def _body(receive: Receive, sent: asyncio.Event) -> AsyncIterator[bytes]:
    """The request's body, piece by piece; ``sent`` is set at its end."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionAbortedError
        yield message.get("body", b"")
        more = message.get("more_body", False)
    sent.set()


async def _until_gone(receive: Receive, sent: asyncio.Event) -> None:
    """Until the client has closed the connection, after it has sent its request."""
    await sent.wait()
    while (await receive())["type"] != "http.disconnect":
        continue
