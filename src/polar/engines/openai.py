"""Why: most engines speak OpenAI's chat API and render and parse by themselves (``chat`` mode). This is the
client for all of them, vLLM and SGLang first: it asks for the ids behind a reply and passes on what came.

``openai_request`` makes the body, ``openai_reply`` reads the answer; connections are ``http``'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import msgspec

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat
from polar.engines.base import ChatChunk, EngineError, EngineInfo
from polar.engines.http import Answer, Upstream
from polar.engines.openai_count import count_tokens
from polar.engines.openai_history import Histories
from polar.engines.openai_models import ask_models
from polar.engines.openai_prompts import PromptTexts
from polar.engines.openai_reply import ReplyReader
from polar.engines.openai_request import request_body
from polar.engines.questions import Questions
from polar.waits import Waits

_ROUTE = "/v1/chat/completions"


class ServerOptions(TypedDict, total=False):
    """How any server is called.

    ``max_inflight``: calls at a time, over which others wait here; by default there is no limit.
    ``require_token_ids``: a reply without ids is an error (by default); if not, its ids stay empty.
    """

    api_key: str | None
    max_inflight: int | None
    require_token_ids: bool


class OpenAIEngine:
    """A chat engine behind a URL (``http://host:port``, with or without ``/v1``).

    Args:
        model: the served name; by default the first that the server lists.
        options: see ``ServerOptions``.
    """

    _health_paths: tuple[str, ...] = ("/health", "/v1/models")
    """Where a look at the server goes: the first that it knows. One without a health route still lists its models."""
    _health_seconds = 10.0

    def __init__(self, url: str, model: str | None = None, **options: Unpack[ServerOptions]) -> None:
        self._upstream = Upstream(url, api_key=options.get("api_key"), max_inflight=options.get("max_inflight"))
        self._model = model
        self._require_token_ids = options.get("require_token_ids", True)
        self._histories = Histories()
        self._prompts = PromptTexts()
        self._info: EngineInfo | None = None
        self._ask_ids = True

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise RuntimeError("the engine has not been started")
        return self._info

    @property
    def waiting(self) -> int:
        """Calls that wait for a slot, where ``max_inflight`` is set."""
        return self._upstream.waiting

    @property
    def slot_waits(self) -> Waits:
        """How long calls waited for a slot, where ``max_inflight`` is set."""
        return self._upstream.slot_waits

    async def start(self) -> None:
        """Ask the server what it serves; and one that is neither vLLM nor SGLang, by a call of one token, whether it
        lets itself be asked for token ids.

        Raises:
            UsageError: nothing answers there, it is no such server, or it does not serve the model.
        """
        self._upstream.open()
        try:
            self._info = await ask_models(self._upstream, self._model)
            if self._info.kind == "openai":
                self._ask_ids = not await Questions(self._upstream, self._info).refuses_to_be_asked()
                self._info = replace(self._info, template_args=self._ask_ids)
        except BaseException:
            await self.close()
            raise

    async def check(self) -> None:
        """See ``Checkable``."""
        for path in self._health_paths:
            status, _ = await self._upstream.ask(path, seconds=self._health_seconds)
            if status != 404:
                break
        if status != 200:
            raise EngineError("unavailable", f"{self._upstream.url}{path} answers {status}", status=status)

    async def close(self) -> None:
        """End every call and let go of every connection."""
        await self._upstream.close()

    async def chat(
        self, chat: Chat, *, request_id: str, affinity: str, stream: bool = True, expected: Ids = NO_IDS
    ) -> AsyncGenerator[ChatChunk, None]:
        """One call. Closing the iterator (or cancelling its reader) closes the connection to the engine, which
        ends the generation there.

        Raises:
            EngineError: see ``ChatEngine``.
        """
        info = self.info
        body = request_body(
            msgspec.structs.replace(chat, messages=()),
            kind=info.kind,
            model=info.model,
            context_length=info.context_length,
            stream=stream,
            ask_ids=self._ask_ids,
        )
        body["messages"] = self._histories.of(affinity, chat.messages)
        headers = {"X-Request-Id": request_id, "X-Session-Id": affinity}
        endpoint = self._upstream.url + _ROUTE
        async with self._upstream.slot():
            answer = await self._open(body, headers)
            try:
                reader = ReplyReader(
                    endpoint,
                    require_token_ids=self._require_token_ids,
                    expected=expected,
                    prompts=self._prompts,
                    session=affinity,
                )
                if not stream:
                    reader.feed(await answer.read_all())
                    yield reader.finish()
                    return
                over = False
                while not over:
                    payloads, over = await answer.read_events()
                    for payload in payloads:
                        reader.feed(payload)
                    chunk = reader.finish() if over else reader.take()
                    if chunk is not None:
                        yield chunk
                await answer.drain()
            finally:
                answer.close()

    async def count(self, chat: Chat) -> int:
        """See ``CountingEngine``."""
        return await count_tokens(self._upstream, chat, kind=self.info.kind, model=self.info.model)

    async def _open(self, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer. Where the prompt fits and only prompt and reply together do not, the limit on the reply
        is left out: the engine then stops at the end of its context."""
        try:
            return await self._upstream.post(_ROUTE, body, headers)
        except EngineError as error:
            fits = error.prompt_tokens is None or error.prompt_tokens < (error.context_length or 0)
            if error.kind != "context_length" or not fits or "max_tokens" not in body:
                raise
        del body["max_tokens"]
        return await self._upstream.post(_ROUTE, body, headers)
