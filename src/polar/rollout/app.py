"""Tables of routes as ASGI apps, and two apps on one port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as PathRoute

from polar.guesses import Guesses
from polar.rollout.auth import Audit, Credentials
from polar.rollout.browsers import OwnNames
from polar.rollout.http import Endpoint, Route, failure

App = Callable[..., Awaitable[None]]

DATA_PATHS = frozenset({"", "s", "v1", "v1alpha", "v1beta"})
"""The first parts of the paths that are the data plane's; errors there have the shapes of its APIs."""


def app(
    routes: Sequence[Route],
    credentials: Credentials,
    audit: Audit | None,
    guesses: Guesses,
    own: OwnNames | None = None,
) -> App:
    """The app of these routes. What is not among them is 404, a method that is not 405.

    Args:
        guesses: told of callers without a good token.
        own: the names under which it may be called without a token.
    """
    names = own or OwnNames()
    table = [
        PathRoute(route.path, Endpoint(route, credentials, audit, names, guesses).answer, methods=[route.method])
        for route in routes
    ]
    made = Starlette(routes=table, exception_handlers={HTTPException: _no_route})
    made.router.redirect_slashes = False
    return made


def one_port(control: App, data: App) -> App:
    """Both planes as one app: a request goes by the first part of its path."""

    async def both(scope: Any, receive: Any, send: Any) -> None:
        own = scope["type"] == "http" and scope["path"][1:].partition("/")[0] not in DATA_PATHS
        await (control if own else data)(scope, receive, send)

    return both


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = failure(error.status_code, f"nothing is served at {request.method} {request.url.path}")
    answer.headers.update(error.headers or {})
    return answer
