"""The data plane: a plain ASGI app that takes model calls in every dialect.

Source of the routes: the dialects. The session is named by its key, in a header, the query or the path
(``/s/{key}/v1/...``, for a harness whose key can't be set); an unknown key is refused, there is no default
session, and nothing else is served.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from urllib.parse import unquote

from polar.capture.retries import KeyReused
from polar.dialects import DIALECTS
from polar.dialects.base import Call, CallError, Dialect, Response, Route, StreamEncoder
from polar.gateway.call import ModelCall
from polar.gateway.digests import CallDigests
from polar.gateway.exchange import ClientGone, Exchange, Receive, Scope, Send
from polar.gateway.inference import InferenceControl
from polar.gateway.pipeline import Pipeline, Request
from polar.gateway.session import LiveSession
from polar.guesses import Guesses
from polar.logs import about
from polar.surrogates import mend_surrogates

log = logging.getLogger("polar.gateway")

OFF_LOOP = 1024 * 1024
"""Bytes from which a body is parsed in a thread, so that one large call does not hold up the others."""
FIRST_BYTE = 1.0
"""Seconds that a stream waits for the engine before its headers go out: until then an error can still be an
HTTP status, from then on the client sees signs of life."""
KEEPALIVE = 10.0
"""Seconds of silence in a stream after which a keep-alive is sent."""
GRACE = 2.0
"""Seconds that a call goes on after its client went away: a retry may join it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may send: bytes of a call's body (screenshots in long conversations go far beyond the usual
    limits), and calls that are in flight at a time, over which it is told to try again later."""

    body: int = 256 * 1024 * 1024
    calls: int = 256


class Gateway:
    """The ASGI app, and the sessions whose keys it knows.

    Args:
        pipeline: what runs the calls.
        dialects: the provider APIs to serve.
        grace: seconds that a call goes on after its last client went away.
        buffer: a streamed reply is sampled whole first, and its client gets the stream in one go at the end.
        limits: of what one session may send.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        dialects: tuple[Dialect, ...] = DIALECTS,
        grace: float = GRACE,
        buffer: bool = False,
        limits: Limits = Limits(),
    ) -> None:
        self.pipeline = pipeline
        self.guesses = Guesses("session key")
        self._limits = limits
        self._grace = grace
        self._buffer = buffer
        self._sessions: dict[str, LiveSession] = {}
        self._told: set[str] = set()
        self._routes = [
            (route, re.compile(route.pattern), dialect) for dialect in dialects for route in dialect.routes
        ]
        self._routes.sort(key=lambda entry: entry[0].header is None)
        self._plain = dialects[0]

    @property
    def inference(self) -> InferenceControl:
        """Pause, resume and weight version: what an operator may do to the calls of all sessions."""
        return self.pipeline.inference

    def open(self, session: LiveSession) -> None:
        """From now on the session's key is good."""
        session.told = self._told
        self._sessions[session.key] = session

    async def close(self, session: LiveSession) -> None:
        """Take no more calls for it; those in flight are given up and recorded. Its key answers 410."""
        await session.close()

    def forget(self, session: LiveSession) -> None:
        """Drop a closed session from memory: its key is unknown from now on (401)."""
        self._sessions.pop(session.key, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One HTTP request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        dialect = self._spoken(exchange.headers)
        called: LiveSession | None = None
        try:
            key, path = _split_key(scope["path"])
            if scope["method"] == "HEAD" or (path == "/" and scope["method"] == "GET"):
                await exchange.respond(Response(200, b""))
                return
            route, dialect, variables = self._route(scope["method"], path, exchange.headers)
            session = self._session(key or exchange.key(), scope)
            called = session if route.action == "generate" else None
            with about(**session.ids):
                await self._act(exchange, session, route, dialect, exchange.query | variables)
        except CallError as error:
            await _refuse(exchange, dialect, error, called)
        except ClientGone:
            return
        except ConnectionAbortedError as cut:  # a stream that failed is cut, which is the server's to do
            if called is not None and isinstance(cut.__cause__, CallError):
                called.refuse(cut.__cause__.message)
            raise
        except Exception as error:
            log.exception("a request can't be served (%s)", dialect.name)
            if exchange.started:
                raise
            await _refuse(exchange, dialect, CallError("internal", f"{type(error).__name__}: {error}"), called)
        finally:
            exchange.close()

    # ---- who calls what ----------------------------------------------------------------------------------

    def _spoken(self, headers: Mapping[str, str]) -> Dialect:
        """Whose shape an error has where no route names the API: a header tells it that only one's clients send."""
        return next((dialect for route, _, dialect in self._routes if route.header in headers), self._plain)

    def _route(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[Route, Dialect, dict[str, str]]:
        for route, pattern, dialect in self._routes:
            if method != route.method or (route.header is not None and route.header not in headers):
                continue
            match = pattern.fullmatch(path)
            if match is not None:
                return route, dialect, {name: unquote(text) for name, text in match.groupdict().items() if text}
        raise CallError("not_found", f"Nothing is served at {method} {path}")

    def _session(self, key: str | None, scope: Scope) -> LiveSession:
        session = self._sessions.get(key or "")
        if session is None:
            client = scope.get("client")
            self.guesses.refused(client[0] if client else None)
            raise CallError("unauthorized", "Unknown API key: use the key of a running session")
        if session.closed:
            raise CallError("gone", "This session is over: its key takes no more calls")
        return session

    # ---- what is done ------------------------------------------------------------------------------------

    async def _act(
        self,
        exchange: Exchange,
        session: LiveSession,
        route: Route,
        dialect: Dialect,
        variables: dict[str, str],
    ) -> None:
        if route.action == "models":
            await exchange.respond(dialect.models([self.pipeline.backend.info.model]))
            return
        if route.action == "model":
            await exchange.respond(dialect.model(variables["model"]))
            return
        if route.action == "upgrade_refused":
            await exchange.respond(Response(426, b"", {"upgrade": "HTTP/1.1"}))
            return
        encoding = exchange.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise CallError("bad_request", f"The body has Content-Encoding {encoding[:40]!r}: send it uncompressed")
        body = await exchange.body(self._limits.body)
        work = (body, dialect, exchange.headers, variables, session.digests)
        digest, parsed = await asyncio.to_thread(_read, *work) if len(body) > OFF_LOOP else _read(*work)
        if session.closed:
            raise CallError("gone", "This session is over: its key takes no more calls")
        if route.action == "count":
            await exchange.respond(dialect.count(await self.pipeline.count(session, parsed)))
            return
        for warning in parsed.warnings:
            session.warn(warning)
        call = self._call(exchange, session, dialect, parsed, digest)
        call.join()
        try:
            if parsed.stream:
                await _answer_stream(exchange, dialect, parsed, call, buffer=self._buffer)
            else:
                await _answer_whole(exchange, dialect, parsed, call)
            call.delivered = call.delivered or call.answer is not None
        finally:
            call.leave()

    def _call(
        self, exchange: Exchange, session: LiveSession, dialect: Dialect, parsed: Call, digest: bytes
    ) -> ModelCall:
        """The call that this request is: one that it repeats, or a new one."""
        key = exchange.headers.get("idempotency-key") or None
        marked = exchange.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        try:
            call = session.ledger.find(digest, key=key, marked=marked)
        except KeyReused:
            raise CallError("conflict", "This Idempotency-Key was used with another body") from None
        if call is not None:
            self.pipeline.counts.joined += 1
        else:
            if len(session.calls) >= self._limits.calls:
                session.warn(f"over {self._limits.calls} calls at a time: more are refused")
                raise CallError("overloaded", f"This session has {len(session.calls)} calls in flight", retry_after=1)
            call = ModelCall(secrets.token_hex(12), grace=self._grace)
            session.ledger.add(digest, call, key=key)
            session.used_at = time.monotonic()
            request = Request(dialect=dialect.name, digest=digest, idempotency_key=key)
            sampled = replace(parsed, stream=False) if self._buffer else parsed
            self.pipeline.start(session, call, sampled, request)
        return call


def _split_key(path: str) -> tuple[str | None, str]:
    """``/s/{key}/rest`` as ``(key, /rest)``."""
    if not path.startswith("/s/"):
        return None, path
    key, _, rest = path[3:].partition("/")
    return key, "/" + rest


def _read(
    body: bytes, dialect: Dialect, headers: Mapping[str, str], variables: Mapping[str, str], digests: CallDigests
) -> tuple[bytes, Call]:
    """A body as a call, and the digest of what it asks for."""
    try:
        parsed = dialect.parse(body, headers, variables)
    except CallError:
        mended = mend_surrogates(body)
        if mended == body:
            raise
        parsed = dialect.parse(mended, headers, variables)
    return digests.of(dialect.name, parsed), parsed


async def _refuse(exchange: Exchange, dialect: Dialect, error: CallError, called: LiveSession | None) -> None:
    """An error instead of an answer; it counts with the session whose model was called."""
    if called is not None:
        called.refuse(error.message)
    await exchange.respond(dialect.error(error))


# ---- answers ---------------------------------------------------------------------------------------------


async def _answer_whole(exchange: Exchange, dialect: Dialect, parsed: Call, call: ModelCall) -> None:
    if not call.finished:
        await exchange.wait(call.ended())
    if call.error is not None:
        raise call.error
    assert call.answer is not None
    await exchange.respond(dialect.encode(parsed, call.answer))


async def _answer_stream(
    exchange: Exchange, dialect: Dialect, parsed: Call, call: ModelCall, *, buffer: bool
) -> None:
    """Events as they come, or with ``buffer`` all of them at the end; the terminal event only once the completion
    is durable. On failure an error event and a hard cut, never a clean short end."""
    encoder = dialect.stream(parsed)
    clock = asyncio.get_running_loop().time
    due = clock() + FIRST_BYTE
    seen = 0
    # Qwen Code goes on after an error in the middle of a stream only where it can name the request.
    headers = {"content-type": encoder.content_type, "cache-control": "no-cache", "x-request-id": call.call_id}
    while not call.finished:
        news = call.ended() if buffer else call.changed()
        changed = await exchange.wait(news, timeout=max(0.0, due - clock()))
        told = b""
        if changed and not call.finished and len(call.deltas) > seen:
            told = _events(encoder, parsed, call, seen)
            seen = len(call.deltas)
        silent = clock() >= due  # news that this API does not tell is no sign of life
        if told or silent:
            await exchange.start(200, headers)
            await exchange.write(told or encoder.keepalive)
            due = clock() + KEEPALIVE
    if call.error is not None:
        if not exchange.started:
            raise call.error
        await exchange.write(encoder.error(call.error))
        raise ConnectionAbortedError from call.error
    assert call.answer is not None
    await exchange.start(200, headers)
    rest = _events(encoder, parsed, call, seen)
    await exchange.write(rest + encoder.finish(call.answer), last=True)


def _events(encoder: StreamEncoder, parsed: Call, call: ModelCall, seen: int) -> bytes:
    """The events of the deltas after the first ``seen``; the opening event before the very first."""
    events: list[bytes] = []
    if not seen:  # first, because an encoder counts and names what follows by it
        events.append(encoder.start(call.call_id, call.created_at, parsed.chat.model, call.prompt_tokens or 0))
    events += [encoder.delta(delta) for delta in call.deltas[seen:]]
    return b"".join(events)
