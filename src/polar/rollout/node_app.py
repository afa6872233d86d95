"""What a gateway node that is apart from its rollout server answers to that server, under the node credential: bare
capture sessions and inference, the same routes as the server's own. Its numbers are for whoever may read: to watch a
node nobody needs the credential that hands in results."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response

from polar.contract.rollout import BARE_NODE, OpenSession
from polar.rollout.app import App, app
from polar.rollout.auth import Credentials
from polar.rollout.hosting import CaptureHost, Inference
from polar.rollout.http import Call, Refused, Route, reply
from polar.rollout.inference_api import InferenceAPI
from polar.rollout.metrics import CONTENT_TYPE, count_guesses
from polar.rollout.sessions_api import Closed, Forgotten, capture_routes


def node_app(
    capture: CaptureHost,
    inference: Inference,
    registry: CollectorRegistry,
    credentials: Credentials,
    *,
    node_id: str,
    server: str,
) -> App:
    """The ASGI app of a node's control plane.

    Args:
        registry: has the node's numbers.
        node_id, server: who this is, and where its rollout server is.
    """
    began = time.time()

    async def open_session(call: Call) -> Response:
        request: OpenSession = call.body or OpenSession()
        if request.metadata.get(BARE_NODE) != node_id:  # its server says where it will look for it
            raise Refused(409, f"node {node_id} opens sessions for its rollout server only: POST {server}/sessions")
        return reply(await capture.open(request))

    async def close_session(call: Call) -> Response:
        name = call.id("session_id")
        return reply(Closed(name, await capture.close(name)))

    async def forget_session(call: Call) -> Response:
        name = call.id("session_id")
        return reply(Forgotten(name, await capture.forget(name)))

    async def health(call: Call) -> Response:
        return reply({"status": "ok", "since": began})

    async def numbers(call: Call) -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE})

    routes = [
        *capture_routes(open_session, close_session, forget_session, "node"),
        *InferenceAPI(inference, "node").routes(),
        Route("GET", "/health", "health", None, health, "Is it there?"),
        Route("GET", "/metrics", "metrics", "read", numbers, "Numbers.", answer="text/plain"),
    ]
    return app(routes, credentials, None, count_guesses(registry))
