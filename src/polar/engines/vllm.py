"""Why: only ids in, ids out makes a conversation exact. vLLM offers that by two routes, of which a server may have
both, one or none; this engine asks it once at the start and takes the best, and its chat route where none is left.

``vllm_probing`` asks, ``vllm_wire`` speaks both token routes, ``vllm_render`` renders and parses by the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from polar.contract.arrays import Ids
from polar.contract.chat import Chat, FinishReason, Message, Sampling
from polar.contract.completion import Mode
from polar.contract.errors import UsageError
from polar.engines.base import EngineInfo, TokenChunk
from polar.engines.capabilities import Capabilities
from polar.engines.openai import OpenAIEngine
from polar.engines.tokenizers import tokenizer_folder
from polar.engines.vllm_probing import probe_vllm
from polar.engines.vllm_render import read_reply, render_prompt
from polar.engines.vllm_wire import BODIES, TokensReader


class VLLMEngine(OpenAIEngine):
    """A vLLM server: a token engine and a rendering engine where it can be, and always a chat engine.

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
        self.capabilities: Capabilities
        """What the server can do; known after ``start``."""

    async def start(self) -> None:
        """Ask the server what it serves and what it can do.

        Raises:
            UsageError: see ``OpenAIEngine``; or there is no such tokenizer, or ``mode`` is ``tito`` and it can't.
        """
        await super().start()
        try:
            self.capabilities = await probe_vllm(self._upstream, self.info)
            self._info = self._described(self.info)
        except BaseException:
            await self.close()
            raise

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
        """One reply. Closing the iterator (or cancelling its reader) closes the connection to the engine, which
        ends the generation there.

        Raises:
            EngineError: see ``TokenEngine``; ``no_token_ids`` names the missing field and URL.
        """
        route = self.capabilities.token_route
        assert route is not None, "a server without a token route is a chat engine"
        room = self.info.context_length - len(prompt_ids)
        body = BODIES[route](
            prompt_ids,
            sampling,
            stop_ids=stop_ids,
            model=self.info.model,
            room=room,
            response_format=response_format,
        )
        if not stream:
            body["stream"] = False
            del body["stream_options"]
        headers = {"X-Request-Id": request_id, "X-Session-Id": affinity}
        reader = TokensReader(self._upstream.url + route)
        async with self._upstream.slot():
            answer = await self._upstream.post(route, body, headers)
            try:
                over = not stream
                if over:
                    reader.feed(await answer.read_all())
                while not over:
                    payloads, over = await answer.read_events()
                    for payload in payloads:
                        reader.feed(payload)
                    chunk = None if over else reader.take()
                    if chunk is not None:
                        yield chunk
                await answer.drain()
            finally:
                answer.close()
        yield reader.finish()

    async def render(self, chat: Chat) -> Ids:
        """See ``RenderingEngine``."""
        return await render_prompt(self._upstream, chat, self.info.model)

    async def read(self, chat: Chat, prompt_ids: Ids, ids: Sequence[int], finish_reason: FinishReason) -> Message:
        """See ``RenderingEngine``."""
        return await read_reply(self._upstream, chat, self.info.model, prompt_ids, ids, finish_reason)

    def _described(self, info: EngineInfo) -> EngineInfo:
        found = self.capabilities
        folder = tokenizer_folder(self._tokenizer or info.model_path or "")
        if folder is None and self._tokenizer is not None:
            raise UsageError(f"--tokenizer {self._tokenizer}: no such folder with a tokenizer, nor such a name here")
        described = EngineInfo(
            kind="vllm",
            model=info.model,
            context_length=info.context_length,
            model_path=str(folder) if folder else None,
            version=info.version,
            url=info.url,
            logprobs=found.logprobs,
            mode=self._mode,
            chat_only=self._chat_only(info),
            renders=found.renders,
            structured=bool(found.structured_outputs),
        )
        if self._mode == "tito" and described.chat_only:
            raise UsageError(f"{info.url} can't be used with --mode tito: {described.chat_only}")
        return described

    def _chat_only(self, info: EngineInfo) -> str | None:
        if self.capabilities.token_route is None:
            return next(f"it has no {lack.what}: {lack.fix}" for lack in self.capabilities.missing)
        if not info.context_length:
            return "it does not say how long its context is (max_model_len in /v1/models)"
        return None
