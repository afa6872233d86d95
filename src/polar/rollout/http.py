"""One route, from its line in the table to its answer: credential, ids, query and body are checked here, the same way
for every route, and every error has one shape, ``{"detail": ...}``.

The table says everything that the OpenAPI page says, so the page can't be wrong.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from polar.contract.arrays import from_json
from polar.contract.errors import NotAllowed, PolarError, UsageError
from polar.contract.task import ID_PATTERN
from polar.guesses import Guesses
from polar.rollout.auth import Actor, Audit, Credentials, Role
from polar.rollout.browsers import OwnNames
from polar.rollout.dispatch import UnknownNode
from polar.rollout.wire import encode
from polar.store.base import NotHeld, StoreConflict

log = logging.getLogger("polar.rollout")

T = TypeVar("T")

LARGEST_BODY = 16 * 1024 * 1024
"""Bytes of a request, where the route says nothing else."""
OFF_LOOP = 1024 * 1024
"""Bytes from which a body is decoded in a thread."""
LARGEST_NUMBER = 2**53 - 1
"""The largest integer in a query: every JSON client can say it, and every database keep it."""

_ID = re.compile(ID_PATTERN)
_NUMBER = re.compile(r"-?\d{1,16}(\.\d{1,9})?")


class Refused(PolarError):
    """An answer that is an error: its HTTP status, and one line that says what to do."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class NotYours(NotAllowed):
    """A node's token was shown for another node: 403."""


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter in the query. ``kind`` is ``str``, ``int``, ``float`` or ``bool``."""

    name: str
    about: str
    kind: type = str
    default: Any = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None

    def read(self, text: str) -> Any:
        """The value.

        Raises:
            Refused: 422; the line says what it may be.
        """
        if self.choices:
            if text not in self.choices:
                raise Refused(422, f"{self.name} must be one of {', '.join(self.choices)}")
            return text
        if self.kind is bool:
            if text.lower() not in ("true", "false", "1", "0"):
                raise Refused(422, f"{self.name} must be true or false")
            return text.lower() in ("true", "1")
        if self.kind is str:
            if self.pattern is not None and not re.fullmatch(self.pattern, text):
                raise Refused(422, f"{self.name} must match {self.pattern}")
            return text
        value = self.kind(text) if _NUMBER.fullmatch(text) and (self.kind is float or "." not in text) else None
        if value is None or not self.lowest <= value <= self.highest:
            what = "a whole number" if self.kind is int else "a number"
            raise Refused(422, f"{self.name} must be {what} from {self.lowest:g} to {self.highest:g}")
        return value

    @property
    def lowest(self) -> float:
        """The least number it takes."""
        return 0 if self.least is None else self.least

    @property
    def highest(self) -> float:
        """The greatest number it takes."""
        return LARGEST_NUMBER if self.most is None else self.most


class Call:
    """A request that may be made, checked."""

    def __init__(
        self,
        request: Request,
        actor: Actor,
        query: dict[str, Any],
        body: Any,
        done: Callable[[str], Awaitable[None]],
    ) -> None:
        self.actor = actor
        self.done = done
        """Writes to the audit log that this is about to be done, where the subject is not in the path."""
        self.query = query
        self.body = body
        self.headers: Mapping[str, str] = request.headers
        self._request = request

    def id(self, name: str) -> str:
        """An id in the path."""
        found: str = self._request.path_params[name]
        return found

    async def while_connected(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the work as long as the caller does: whoever has gone away is given nothing.

        Raises:
            ClientDisconnect: the caller left first.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await each

    async def _gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            continue


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """A line of the table.

    Args:
        name: what is done, as the audit log calls it.
        role: who may; ``None``: everybody.
        audited: whether it is written to the audit log when it is done, too, and not only when it is refused; it may
            depend on the query.
        body, optional_body: the type of the JSON body, and whether it may be left out.
        unchecked: the handler gets the body as a plain object, and checks it itself.
        answer: the type of the answer, or its media type where it is not JSON.
        statuses: further statuses that it answers with.
    """

    method: str
    path: str
    name: str
    role: Role | None
    handler: Handler
    about: str
    query: tuple[Query, ...] = ()
    body: Any = None
    optional_body: bool = False
    unchecked: bool = False
    largest: int = LARGEST_BODY
    answer: Any = dict[str, Any]
    statuses: tuple[int, ...] = ()
    audited: Callable[[Mapping[str, Any]], bool] = lambda _: False

    @property
    def ids(self) -> list[str]:
        """The ids in its path."""
        return re.findall(r"{(\w+)}", self.path)


class Endpoint:
    """Answers the requests of one route."""

    def __init__(
        self, route: Route, credentials: Credentials, audit: Audit | None, own: OwnNames, guesses: Guesses
    ) -> None:
        self._route = route
        self._credentials = credentials
        self._audit = audit
        self._own = own
        self._guesses = guesses

    async def answer(self, request: Request) -> Response:
        """One request: its answer, or its error in the one shape that errors have."""
        try:
            return await self._checked(request)
        except Refused as error:
            return failure(error.status, str(error))
        except NotYours as error:
            return failure(403, str(error))
        except UnknownNode as error:
            return failure(404, str(error))
        except UsageError as error:
            return failure(422, str(error))
        except StoreConflict as error:
            return failure(409, str(error))
        except PolarError as error:  # the database's word, for the most part
            log.error("%s %s: %s", self._route.method, self._route.path, error)
            return failure(503, str(error))
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception:
            log.exception("%s %s", self._route.method, self._route.path)
            return failure(500, "the server failed: its log says how")

    async def _checked(self, request: Request) -> Response:
        actor = await self._permit(request)
        for name in self._route.ids:
            if not _ID.fullmatch(request.path_params[name]):
                raise Refused(422, f"{name} must be letters, digits, '_', '.' or '-', 128 at most")
        query = {each.name: each.default for each in self._route.query}
        for each in self._route.query:
            if each.name in request.query_params:
                query[each.name] = each.read(request.query_params[each.name])
        body = await self._body(request) if self._route.body is not None else None
        subject = self._subject(request)

        async def done(subject: str) -> None:
            if self._audit is not None:
                await self._audit.done(actor, self._route.name, subject)

        if self._route.audited(query):
            await done(subject)
        try:
            return await self._route.handler(Call(request, actor, query, body, done))
        except (NotAllowed, NotHeld) as error:
            if self._audit is not None:
                named = body.get("task_id") if isinstance(body, dict) else getattr(body, "node_id", None)
                await self._audit.refused(actor, self._route.name, subject or str(named)[:128], str(error)[:1000])
            raise

    async def _permit(self, request: Request) -> Actor:
        role = self._route.role
        if role is None:
            return Actor("anonymous", "read")
        token = shown_token(request.headers)
        actor = self._credentials.who(token)
        foreign = self._own.foreign(request.headers) if token is None and actor is not None else None
        other = self._other_node(actor, request)
        if actor is not None and actor.may(role) and foreign is None and other is None:
            return actor
        if foreign is not None:
            status, why, actor = 401, foreign, None
        elif actor is None:
            said = "no token" if token is None else "unknown credential"
            status, why = 401, f"{said}: send a token of this server as 'Authorization: Bearer TOKEN'"
        elif actor.may(role) and other is not None:
            status, why = 403, other
        else:
            who = "a caller without a token" if token is None else f"the token {actor.name}"
            status, why = 403, f"{who} has the role {actor.role}, and this needs {role}"
        if actor is None:
            self._guesses.refused(request.client.host if request.client else None)
        if self._audit is not None:
            await self._audit.refused(actor, self._route.name, self._subject(request), why)
        raise Refused(status, why)

    def _other_node(self, actor: Actor | None, request: Request) -> str | None:
        """Why a node's token is not good for the node in the path."""
        if actor is None or self._route.role != "node" or "node_id" not in self._route.ids:
            return None
        return actor.not_for(request.path_params["node_id"])

    def _subject(self, request: Request) -> str:
        names = self._route.ids
        return str(request.path_params[names[0]])[:128] if names else ""

    async def _body(self, request: Request) -> Any:
        data = bytearray()
        async for piece in request.stream():
            data += piece
            if len(data) > self._route.largest:
                raise Refused(413, f"the body is over {self._route.largest} bytes")
        if not data and self._route.optional_body:
            return None
        work = (bytes(data), dict[str, Any] if self._route.unchecked else self._route.body)
        return await asyncio.to_thread(_decode, *work) if len(data) > OFF_LOOP else _decode(*work)


def shown_token(headers: Mapping[str, str]) -> str | None:
    """The token that a request shows: as a bearer, or as ``X-Polar-Control-Token``."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer " and bearer[7:].strip():
        return bearer[7:].strip()
    return headers.get("x-polar-control-token") or None


def reply(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(encode(value), status, media_type="application/json")


def failure(status: int, detail: str) -> Response:
    """An error, in one line."""
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse({"detail": " ".join(detail.split())}, status, headers)


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return from_json(data, kind)
    except msgspec.ValidationError as error:
        raise Refused(422, str(error)) from None
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise Refused(422, f"the body is not valid JSON: {error}") from None
