"""A trainer's end of a callback: a real HTTP server that writes down what it gets and answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.gateway.server import GatewayServer

HANG = 0
"""As an answer: none at all."""


class Receiver:
    """Args: answer: the status for the n-th call (0, 1, ...) on a path."""

    def __init__(self, answer: Callable[[int], int] = lambda _: 200) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self._answer = answer
        self._came = asyncio.Condition()
        app = Starlette(routes=[Route("/{path:path}", self._take, methods=["POST", "GET"])])
        self._http = GatewayServer(app)

    @property
    def url(self) -> str:
        return self._http.url

    async def __aenter__(self) -> Receiver:
        await self._http.start()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.close()

    async def wait(self, count: int, path: str | None = None) -> list[tuple[str, dict[str, str], bytes]]:
        """What came, once there are so many."""
        async with asyncio.timeout(20), self._came:
            await self._came.wait_for(lambda: len(self._on(path)) >= count)
        return self._on(path)

    def _on(self, path: str | None) -> list[tuple[str, dict[str, str], bytes]]:
        return [each for each in self.got if path in (None, each[0])]

    async def _take(self, request: Request) -> Response:
        path = request.url.path
        status = self._answer(len(self._on(path)))
        self.got.append((path, dict(request.headers), await request.body()))
        async with self._came:
            self._came.notify_all()
        if status == HANG:
            await asyncio.sleep(3600)
        headers = {"location": f"{self.url}/elsewhere"} if 300 <= status < 400 else {}
        return Response(status_code=status, headers=headers)
