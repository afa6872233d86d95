"""Why: SGLang's native ``/generate`` takes token ids and gives token ids back, each with its logprob and the weights
it was sampled under, so a session's context stays exact and an update in the middle of a reply is known to the token.

``sglang_server`` asks what is there, ``sglang_probing`` what it can do; ``sglang_request`` makes the body of a call,
``sglang_reply`` reads the stream.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.contract.completion import Mode
from polar.contract.errors import UsageError
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from polar.engines.capabilities import Capabilities
from polar.engines.http import Answer
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang_probing import probe_sglang
from polar.engines.sglang_reply import ROUTE, GenerateReader
from polar.engines.sglang_request import request_body
from polar.engines.sglang_server import Server, ask_server
from polar.engines.tokenizers import tokenizer_folder

_ABORT_SECONDS = 5.0


class SGLangEngine(OpenAIEngine):
    """An SGLang server (not a router before some): a token engine where it can be, and always a chat engine.

    Args:
        url, model, api_key, max_inflight, require_token_ids: see ``OpenAIEngine``.
        mode: ``tito`` makes it an error if token ids can't be had; ``chat`` makes no use of them.
        tokenizer: a folder, or a name in a local cache, instead of what the server names as its model.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        api_key: str | None = None,
        max_inflight: int | None = None,
        mode: Mode | None = None,
        tokenizer: str | None = None,
        require_token_ids: bool = True,
    ) -> None:
        super().__init__(url, model, api_key=api_key, max_inflight=max_inflight, require_token_ids=require_token_ids)
        self._mode = mode
        self._tokenizer = tokenizer
        self._incremental = False
        self._aborts: set[asyncio.Task[None]] = set()
        self.capabilities: Capabilities
        """What the server can do; known after ``start``."""

    async def start(self) -> None:
        """Ask the server what it serves and what it can do.

        Raises:
            UsageError: see ``OpenAIEngine``; it is no SGLang server, or a router; there is no such tokenizer; or
                ``mode`` is ``tito`` and it can't.
        """
        await super().start()
        try:
            server = await ask_server(self._upstream, self.info.model)
            self._incremental = server.incremental
            self.capabilities = await probe_sglang(self._upstream, self.info)
            self._info = self._described(self.info, server)
        except BaseException:
            await self.close()
            raise

    async def check(self) -> None:
        """See ``Checkable``. SGLang's ``/health`` samples a token, which a paused server does not do: that would
        make every update of the weights look like a failure."""
        path = "/v1/models"
        status, _ = await self._upstream.ask(path)
        if status != 200:
            raise EngineError("unavailable", f"{self._upstream.url}{path} answers {status}", status=status)

    async def close(self) -> None:
        """End every call and let go of every connection. Safe to call twice."""
        await asyncio.gather(*self._aborts)
        await super().close()

    async def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        affinity: str,
        response_format: dict[str, Any] | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[TokenChunk, None]:
        """One reply; the id that ends it is part of it. Closing the iterator (or cancelling its reader) ends the
        generation.

        Raises:
            EngineError: see ``TokenEngine``; ``no_token_ids`` names the missing field and URL.
        """
        # SGLang aborts all calls whose name begins with the one it is told; and two seconds after a streamed call has
        # ended, whatever goes by its name by then. So every call has a name of its own, and none begins another's.
        rid = f"{uuid.uuid4().hex}-{request_id}"
        body = request_body(
            prompt_ids,
            sampling,
            rid=rid,
            stop_ids=stop_ids,
            max_new_tokens=_limit(self.info.context_length, len(prompt_ids), sampling.max_tokens),
            incremental=self._incremental,
            response_format=response_format,
        )
        body["stream"] = stream
        headers = {"X-Request-Id": request_id, "X-Session-Id": affinity}
        reader = GenerateReader(self._upstream.url + ROUTE, len(prompt_ids))
        async with self._upstream.slot():
            answer: Answer | None = None
            try:
                answer = await self._upstream.post(ROUTE, body, headers)
                over = False
                while not over and not reader.finished:
                    payloads, over = await answer.read_events() if stream else ([await answer.read_all()], True)
                    for payload in payloads:
                        chunk = reader.feed(payload)
                        if chunk is not None:
                            yield chunk
                reader.end()
                await answer.drain()
            finally:
                if answer is not None:
                    answer.close()
                if not reader.finished:
                    self._abort(rid)

    def _described(self, info: EngineInfo, server: Server) -> EngineInfo:
        folder = tokenizer_folder(self._tokenizer or server.tokenizer_path or "")
        if folder is None and self._tokenizer is not None:
            raise UsageError(f"--tokenizer {self._tokenizer}: no such folder with a tokenizer, nor such a name here")
        described = replace(
            info,
            kind="sglang",
            model_path=str(folder) if folder else None,
            version=server.version,
            logprobs=self.capabilities.logprobs,
            mode=self._mode,
            chat_only=self._chat_only(info, server),
            structured=bool(self.capabilities.structured_outputs),
        )
        if self._mode == "tito" and described.chat_only:
            raise UsageError(f"{info.url} can't be used with --mode tito: {described.chat_only}")
        return described

    def _chat_only(self, info: EngineInfo, server: Server) -> str | None:
        if server.adapter:
            return f"{info.model} is an adapter, and only the model it belongs to is sampled from by token ids"
        if self.capabilities.token_route is None:
            return next(f"it has no {lack.what}: {lack.fix}" for lack in self.capabilities.missing)
        if not info.context_length:
            return "it does not say how long its context is (max_model_len in /v1/models)"
        return None

    def _abort(self, rid: str) -> None:
        """Tell the server that a call is not wanted any more. Of a closed connection it takes notice at the next
        token: for a call that waits in its queue, that is seconds."""
        task = asyncio.create_task(self._send_abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, rid: str) -> None:
        try:
            await self._upstream.ask("/abort_request", {"rid": rid}, seconds=_ABORT_SECONDS)
        except EngineError:
            return  # it is down, or soon will notice by itself


def _limit(context_length: int, prompt_tokens: int, max_tokens: int | None) -> int:
    """Ids that the reply may have: SGLang refuses a call whose prompt and limit together exceed the context."""
    room = context_length - prompt_tokens
    if room < 1:
        raise EngineError(
            "context_length",
            f"the prompt has {prompt_tokens} tokens, and the model's context is {context_length}",
            prompt_tokens=prompt_tokens,
            context_length=context_length,
        )
    return room if max_tokens is None else min(max_tokens, room)
