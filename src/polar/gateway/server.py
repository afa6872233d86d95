"""Serving an ASGI app on loopback, inside the running event loop, on as many sockets as sandboxes bring.

uvicorn does the HTTP. One socket is the gateway's own; each sandbox without a network hands over another one
that listens inside it, so the only thing a program in there can reach is this gateway.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from polar.contract.errors import UsageError
from polar.gateway.plain_http import PlainHttpProtocol, Room

_GC = (20_000, 20, 20)
"""What a call allocates goes away by itself when it ends. With Python's own threshold (700 objects) the collector
looks at every call several times, which is a tenth of all CPU."""
MOST_FILES = 65536
"""Open files that this process takes, where it may: each connection is one."""


class GatewayServer:
    """The HTTP server of an ASGI app.

    Args:
        app: the ASGI app.
        host, port: where it listens; port 0 takes a free one.
        tls: serve HTTPS on that address.
    """

    def __init__(
        self, app: Callable[..., Any], *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self._config = uvicorn.Config(
            app,
            http=PlainHttpProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=3600,
        )
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._state = ServerState()
        self._host, self._port = host, port
        self._tls = tls
        self._listeners: list[asyncio.Server] = []

    @property
    def url(self) -> str:
        """Where the app is served, once started."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            UsageError: the address can't be had.
        """
        gc.set_threshold(*_GC)
        _take_files()
        listener = _listener(self._host, self._port)
        self._port = listener.getsockname()[1]
        await self.serve(listener, tls=self._tls)

    async def serve(
        self, listener: socket.socket, *, tls: ssl.SSLContext | None = None, connections: int | None = None
    ) -> asyncio.Server:
        """Serve on one more listening socket, which is closed with the server that is returned.

        Args:
            connections: how many it takes at a time; by default as many as come.
        """
        loop = asyncio.get_running_loop()
        room = None if connections is None else Room(connections)
        server = await loop.create_server(lambda: self._protocol(room), sock=listener, backlog=2048, ssl=tls)
        self._listeners.append(server)
        return server

    async def release(self, server: asyncio.Server) -> None:
        """Stop serving on a socket that ``serve`` took."""
        server.close()
        if server in self._listeners:
            self._listeners.remove(server)

    async def close(self) -> None:
        """Stop listening and cut the connections that are left."""
        for server in self._listeners:
            server.close()
        self._listeners.clear()
        for connection in list(self._state.connections):
            connection.shutdown()
        for task in list(self._state.tasks):
            task.cancel()

    def _protocol(self, room: Room | None) -> asyncio.Protocol:
        return PlainHttpProtocol(
            room=room,
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )


def require_free(host: str, port: int) -> None:
    """See that nobody listens there.

    Raises:
        UsageError: the address can't be had.
    """
    _listener(host, port).close()


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"Can't listen on {host}:{port} ({error.strerror}): another program has that address"
        ) from None
    return listener


def _take_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
