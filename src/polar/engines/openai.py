"""Why: most engines speak OpenAI's chat API and render and parse by themselves (``chat`` mode). This is the
client for all of them, vLLM and SGLang first: it asks for the ids behind a reply and passes on what came.

``openai_request`` makes the body, ``openai_sse`` and ``openai_reply`` read the answer, ``openai_errors`` sorts
the errors. Here: connections, limits, the one retry, and whose fault it is when something breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat
from polar.contract.errors import UsageError
from polar.engines.base import ChatChunk, EngineError, EngineInfo
from polar.engines.openai_errors import error_of_reply
from polar.engines.openai_models import describe, error_of_start
from polar.engines.openai_reply import ReplyReader
from polar.engines.openai_request import request_body
from polar.engines.openai_sse import EventReader

_CONNECT_SECONDS = 10.0
_START_SECONDS = 30.0
_DRAIN_SECONDS = 1.0
_KEEPALIVE_SECONDS = 4.0
"""Shorter than the 5 s after which common servers hang up, so we seldom write into a closing connection."""
_READ_BUFFER = 1 << 18

_BROKEN = (aiohttp.ClientError, OSError, TimeoutError)
_DIED_EARLY = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


class OpenAIEngine:
    """A chat engine behind a URL (``http://host:port``, with or without ``/v1``).

    Args:
        model: the served name; by default the first that the server lists.
        max_inflight: calls at a time, over which others wait here; by default there is no limit.
        require_token_ids: a reply without ids is an error. If not, its ids stay empty.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        max_inflight: int | None = None,
        require_token_ids: bool = True,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.waiting = 0
        """Calls that wait for a slot, where ``max_inflight`` is set."""
        self._endpoint = f"{self.url}/v1/chat/completions"
        self._model = model
        self._api_key = api_key
        self._slots = asyncio.Semaphore(max_inflight) if max_inflight else None
        self._require_token_ids = require_token_ids
        self._info: EngineInfo | None = None
        self._session: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    async def start(self) -> None:
        """Ask the server what it serves.

        Raises:
            UsageError: nothing answers there, it is no such server, or it does not serve the model.
        """
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UsageError(f"engine URL {self.url!r} is no http(s) address: give one like http://127.0.0.1:8000")
        self._session = self._connect(force_close=False)
        self._fresh = self._connect(force_close=True)
        try:
            self._info = await self._describe(self._session)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every call and let go of every connection."""
        for session in (self._session, self._fresh):
            if session is not None:
                await session.close()

    async def chat(
        self, chat: Chat, *, request_id: str, affinity: str, stream: bool = True, expected: Ids = NO_IDS
    ) -> AsyncGenerator[ChatChunk, None]:
        """One call. Closing the iterator (or cancelling its reader) closes the connection to the engine, which
        ends the generation there.

        Raises:
            EngineError: see ``ChatEngine``.
        """
        info = self.info
        body = request_body(chat, kind=info.kind, model=info.model, context_length=info.context_length, stream=stream)
        headers = {"X-Request-Id": request_id, "X-Session-Id": affinity}
        async with self._slot():
            response = await self._open(body, headers)
            try:
                reader = ReplyReader(self._endpoint, require_token_ids=self._require_token_ids, expected=expected)
                if not stream:
                    reader.feed(await self._read_all(response))
                    yield reader.finish()
                    return
                events, over = EventReader(), False
                while not over:
                    over = _read_events(reader, events, await self._read_some(response))
                    chunk = reader.finish() if over else reader.take()
                    if chunk is not None:
                        yield chunk
                await _drain(response)
            finally:
                response.close()

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

    async def _describe(self, session: aiohttp.ClientSession) -> EngineInfo:
        answers: list[tuple[int, bytes]] = []
        for path in ("/v1/models", "/version"):
            try:
                async with asyncio.timeout(_START_SECONDS), session.get(self.url + path) as response:
                    answers.append((response.status, await response.read()))
            except _BROKEN as error:
                raise error_of_start(self.url, error) from None
        return describe(self.url, self._model, models=answers[0], version=answers[1])

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        if self._slots is None:
            yield
            return
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    async def _open(self, body: dict[str, Any], headers: dict[str, str]) -> aiohttp.ClientResponse:
        """The response, once it is a 200. Where the prompt fits and only prompt and reply together do not, the
        limit on the reply is left out: the engine then stops at the end of its context."""
        while True:
            response = await self._post(_encode(body), headers)
            if response.status == 200:
                return response
            error = error_of_reply(response.status, await self._read_all(response), self._endpoint)
            fits = error.prompt_tokens is None or error.prompt_tokens < (error.context_length or 0)
            if error.kind != "context_length" or not fits or "max_tokens" not in body:
                raise error
            del body["max_tokens"]

    async def _post(self, data: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Send. A kept-alive connection that breaks before the first byte of an answer was dead all along, so
        the call goes out once more, on a fresh one."""
        assert self._session is not None
        assert self._fresh is not None
        reused: list[bool] = []
        try:
            return await self._session.post(
                self._endpoint, data=data, headers=headers, trace_request_ctx=reused, allow_redirects=False
            )
        except _DIED_EARLY as error:
            begun = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if not reused or begun:
                raise self._unavailable(error) from None
        except _BROKEN as error:
            raise self._unavailable(error) from None
        try:
            return await self._fresh.post(self._endpoint, data=data, headers=headers, allow_redirects=False)
        except _BROKEN as error:
            raise self._unavailable(error) from None

    async def _read_some(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.content.readany()
        except _BROKEN as error:
            raise self._unavailable(error) from None

    async def _read_all(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except _BROKEN as error:
            raise self._unavailable(error) from None
        finally:
            response.close()

    def _unavailable(self, error: BaseException) -> EngineError:
        what = " ".join(str(error).split()) or type(error).__name__
        return EngineError("unavailable", f"{self._endpoint}: the connection failed ({what})")


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # an integer over 64 bits
        raise EngineError("bad_request", f"the call can't be sent to the engine: {error}") from None


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.append(True)


def _read_events(reader: ReplyReader, events: EventReader, piece: bytes) -> bool:
    """Feed the events in ``piece`` (empty at the end of the stream); whether the reply is over."""
    for payload in events.feed(piece) if piece else events.end():
        if payload == b"[DONE]":
            return True
        reader.feed(payload)
    return not piece


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last event, so that the connection can be used again."""
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while not response.content.at_eof():
                await response.content.readany()
    except _BROKEN:
        return
