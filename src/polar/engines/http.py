"""Why: every engine behind a URL needs the same care below its own words: no hidden cap on connections, a call
that is sent twice only where nobody can have seen the first one, a slot that is free as soon as nobody listens,
and one line that says which address failed. ``Upstream`` is that, for one server; it knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from polar.contract.errors import UsageError
from polar.engines.base import EngineError
from polar.engines.openai_errors import error_of_reply
from polar.engines.openai_sse import EventReader
from polar.waits import Waits

_CONNECT_SECONDS = 10.0
_ASK_SECONDS = 30.0
_DRAIN_SECONDS = 1.0
_KEEPALIVE_SECONDS = 4.0
"""Shorter than the 5 s after which common servers hang up, so we seldom write into a closing connection."""
_READ_BUFFER = 1 << 18
_GATHER_SECONDS = 0.1
"""Between two looks at a stream. Each token by itself, through all that follows, costs several times what the same
tokens cost together, and harnesses wait for whole replies."""

_BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
_DIED_EARLY = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


class NoAnswer(EngineError):
    """Something is there, and said nothing in the time it had."""


class Answer:
    """A reply with status 200, as it arrives. Closing it before its end closes the connection, which tells the
    engine that nobody listens any more.

    Every method raises ``EngineError`` (``unavailable``) where the connection fails.
    """

    def __init__(self, response: aiohttp.ClientResponse, endpoint: str) -> None:
        self._response = response
        self._endpoint = endpoint
        self._events = EventReader()
        self._next_look = 0.0
        self._broken: BaseException | None = None

    async def read_all(self) -> bytes:
        """The whole body."""
        try:
            return await self._response.read()
        except _BROKEN as error:
            raise _failed(self._endpoint, error) from None

    async def read_events(self) -> tuple[list[bytes], bool]:
        """The data of the server-sent events in the next piece of the body, and whether the stream is over
        (by ``[DONE]``, which is not among them, or by its end). What comes within a tenth of a second of the piece
        before is one piece; the first one, an end and a cut are seen at once."""
        try:
            piece = await self._gathered()
        except _BROKEN as error:
            raise _failed(self._endpoint, error) from None
        events = self._events.feed(piece) if piece else self._events.end()
        if b"[DONE]" in events:
            return events[: events.index(b"[DONE]")], True
        return events, not piece

    async def _gathered(self) -> bytes:
        """What came until it is time to look again; nothing at the end. A cut is told after what came before it."""
        if self._broken is not None:
            raise self._broken
        pieces = [await self._response.content.readany()]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_look):
                while pieces[-1] and self._broken is None:
                    try:
                        pieces.append(await self._response.content.readany())
                    except _BROKEN as error:
                        self._broken = error
        self._next_look = asyncio.get_running_loop().time() + _GATHER_SECONDS
        return b"".join(pieces)

    async def drain(self) -> None:
        """Read what follows the last event, so that the connection can be used again."""
        try:
            async with asyncio.timeout(_DRAIN_SECONDS):
                while not self._response.content.at_eof():
                    await self._response.content.readany()
        except _BROKEN:
            return

    def close(self) -> None:
        self._response.close()


class Upstream:
    """One server (``http://host:port``, with or without ``/v1``).

    Args:
        max_inflight: calls at a time, over which others wait here; by default there is no limit.
    """

    def __init__(self, url: str, *, api_key: str | None = None, max_inflight: int | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.waiting = 0
        """Calls that wait for a slot, where ``max_inflight`` is set."""
        self.slot_waits = Waits()
        self._api_key = api_key
        self._slots = asyncio.Semaphore(max_inflight) if max_inflight else None
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Get ready to connect.

        Raises:
            UsageError: the URL is none.
        """
        try:
            address = urlsplit(self.url)
            sound = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # of the port
            sound = False
        if not sound:
            raise UsageError(f"engine URL {self.url!r} is no http(s) address: give one like http://127.0.0.1:8000")
        self._session = self._connect(force_close=False)
        self._fresh = self._connect(force_close=True)

    async def close(self) -> None:
        """End every call and let go of every connection. Safe to call twice."""
        for session in (self._session, self._fresh):
            if session is not None:
                await session.close()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Room for one call; waits for it where ``max_inflight`` are under way."""
        if self._slots is None:
            yield
            return
        self.waiting += 1
        try:
            with self.slot_waits.timed():
                await self._slots.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """Send a call. The caller closes the answer.

        A kept-alive connection that breaks before the first byte of an answer was dead all along, so the call
        goes out once more, on a fresh one.

        Raises:
            EngineError: the connection failed, or the status is not 200.
        """
        endpoint = self.url + path
        response = await self._send(endpoint, encode(body), headers)
        answer = Answer(response, endpoint)
        if response.status == 200:
            return answer
        try:
            raise error_of_reply(response.status, await answer.read_all(), endpoint)
        finally:
            answer.close()

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        seconds: float = _ASK_SECONDS,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST where there is a ``body``; for what is no call of a session.

        Raises:
            EngineError: ``unavailable``: nothing answers there; ``NoAnswer``: not within ``seconds``.
        """
        endpoint, data = self.url + path, None if body is None else encode(body)
        try:
            async with asyncio.timeout(seconds), await self._send(endpoint, data, headers) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise NoAnswer("unavailable", f"{endpoint} did not answer within {seconds:.0f} s") from None
        except _BROKEN as error:
            raise _failed(endpoint, error) from None

    def _connect(self, *, force_close: bool) -> aiohttp.ClientSession:
        watch_reuse = aiohttp.TraceConfig()
        watch_reuse.on_connection_reuseconn.append(_note_reuse)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        keepalive: dict[str, Any] = {} if force_close else {"keepalive_timeout": _KEEPALIVE_SECONDS}
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=force_close, **keepalive),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_SECONDS),
            headers=headers,
            trace_configs=[] if force_close else [watch_reuse],
            read_bufsize=_READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def _send(self, endpoint: str, data: bytes | None, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Headers and the open body of the answer to a POST, or of a GET where there is no ``data``."""
        method = "GET" if data is None else "POST"
        assert self._session is not None
        assert self._fresh is not None
        reused: list[bool] = []
        try:
            return await self._session.request(
                method, endpoint, data=data, headers=headers, trace_request_ctx=reused, allow_redirects=False
            )
        except _DIED_EARLY as error:
            begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if not reused or begun:
                raise _failed(endpoint, error) from None
        except _BROKEN as error:
            raise _failed(endpoint, error) from None
        try:
            return await self._fresh.request(method, endpoint, data=data, headers=headers, allow_redirects=False)
        except _BROKEN as error:
            raise _failed(endpoint, error) from None


def encode(body: Any) -> bytes:
    """JSON; numpy arrays of ids are written as they are.

    Raises:
        EngineError: ``bad_request``: it can't be written.
    """
    try:
        return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:  # an integer over 64 bits
        raise EngineError("bad_request", f"the call can't be sent to the engine: {error}") from None


def _failed(endpoint: str, error: BaseException) -> EngineError:
    what = " ".join(str(error).split()) or type(error).__name__
    return EngineError("unavailable", f"{endpoint}: the connection failed ({what})")


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.append(True)
