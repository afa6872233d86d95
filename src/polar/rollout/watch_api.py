"""To watch a server by: how the fleet stands, what happens, numbers for Prometheus, and the OpenAPI page."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import msgspec
from starlette.responses import Response, StreamingResponse

import polar
from polar.contract.result import SessionState
from polar.contract.rollout import Event, NodeInfo
from polar.rollout.feed import Feed, within
from polar.rollout.http import Call, Query, Route, reply
from polar.rollout.metrics import CONTENT_TYPE, Metrics
from polar.rollout.views import whole_nodes
from polar.rollout.wire import encode
from polar.store.ledger import Ledger

COUNT_EVERY = 1.0
"""Seconds for which a count of all sessions is good enough."""
SSE_HEARTBEAT = 15.0
_PAGE = 500


class Health(msgspec.Struct):
    """The server is there, and its database answers."""

    status: str
    nodes: int


class WatchAPI:
    """The routes to watch by.

    Args:
        page: the OpenAPI document.
    """

    def __init__(self, ledger: Ledger, feed: Feed, metrics: Metrics, page: Callable[[], dict[str, Any]]) -> None:
        self._ledger = ledger
        self._feed = feed
        self._metrics = metrics
        self._page = page
        self._states: Counter[str] = Counter()
        self._counted = -COUNT_EVERY
        self._counting = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        after = Query("after", "Only events after this one; the header Last-Event-ID says the same.", int)
        return [
            Route("GET", "/health", "health", None, self.health, "Is it there?", answer=Health),
            Route("GET", "/rollout/status", "status", "read", self.status, "How the fleet stands."),
            Route(
                "GET", "/events", "events", "read", self.events, "What happens, as server-sent events.",
                query=(after,), answer="text/event-stream",
            ),
            Route("GET", "/metrics", "metrics", "read", self.metrics, "Numbers.", answer="text/plain"),
            Route("GET", "/openapi.json", "openapi", None, self.openapi, "This page."),
        ]  # fmt: skip

    async def health(self, call: Call) -> Response:
        return reply(Health("ok", len(await self._nodes())))

    async def status(self, call: Call) -> Response:
        progress = await self._ledger.progress()
        nodes = await self._nodes()
        states = await self._count()
        return reply(
            {
                "service": {"polar": polar.__version__, "time": time.time()},
                "tasks": {each.task_id: each.status for each in progress},
                "pipeline": {
                    "sessions": {state: states.get(state, 0) for state in get_args(SessionState)},
                    "callbacks_failed": [
                        {"task_id": name, "error": error} for name, error in await self._ledger.callbacks_failed()
                    ],
                },
                "nodes": {
                    "total": len(nodes),
                    "healthy": sum(node.healthy and not node.draining for node in nodes),
                    "draining": sum(node.draining for node in nodes),
                    "sessions": sum(node.sessions for node in nodes),
                    "nodes": nodes,
                },
            }
        )

    async def events(self, call: Call) -> Response:
        """From the event after the one named; from now on, if none is."""
        after = call.query["after"]
        named = call.headers.get("last-event-id")
        if named:
            after = Query("Last-Event-ID", "", int).read(named)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        stream = self._stream(self._feed.last if after is None else after)
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def metrics(self, call: Call) -> Response:
        body = self._metrics.expose(await self._count(), await self._nodes())
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def openapi(self, call: Call) -> Response:
        return reply(self._page())

    async def _nodes(self) -> list[NodeInfo]:
        return whole_nodes(await self._ledger.nodes(time.time()))

    async def _count(self) -> Counter[str]:
        """Sessions by state, counted now or a moment ago."""
        async with self._counting:
            if time.monotonic() - self._counted >= COUNT_EVERY:
                self._states = Counter(await self._ledger.session_states())
                self._counted = time.monotonic()
        return self._states

    async def _stream(self, last: int) -> AsyncIterator[bytes]:
        yield b": from event %d on\n\n" % last
        while not self._feed.closed:
            happened = self._feed.any.next()
            events = await self._ledger.events_after(last, _PAGE)
            for event in events:
                yield _event(event)
                last = event.id
            if len(events) == _PAGE:
                continue
            await within(happened, SSE_HEARTBEAT)
            if not happened.done():
                yield b": still here\n\n"


def _event(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.id, event.kind.encode(), encode(event))
