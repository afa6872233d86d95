"""Why: SGLang's router is no server of its own: it names the servers behind it, and that is all we ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

WORKER = {
    "id": "042b236f",
    "url": "http://127.0.0.1:1",
    "model_id": "m",
    "priority": 50,
    "worker_type": "regular",
    "is_healthy": True,
    "load": 0,
    "connection_mode": "HTTP",
    "metadata": {"dp_size": "1"},
}
"""As sglang-router 0.3.2 lists it."""


@asynccontextmanager
async def router(*workers: dict[str, Any], old: bool = False, key: str | None = None) -> AsyncIterator[str]:
    """A server that lists workers as the router does, and knows no more."""

    async def listed(request: web.Request) -> web.Response:
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.Response(status=401)
        if old:
            return web.json_response({"urls": [worker["url"] for worker in workers]})
        return web.json_response({"workers": list(workers), "total": len(workers), "stats": {}})

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "local"}]})

    app = web.Application()
    app.add_routes([web.get("/list_workers" if old else "/workers", listed), web.get("/v1/models", models)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
