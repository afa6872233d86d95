"""Why: only ids in, ids out makes a conversation exact. vLLM offers that by two routes, of which a server may have
both, one or none; this engine asks it once at the start and takes the best, and its chat route where none is left.

``vllm_probing`` asks, ``vllm_wire`` speaks both token routes, ``vllm_render`` renders and parses by the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

from polar.contract.arrays import Ids
from polar.contract.chat import Chat, FinishReason, Message, Sampling
from polar.engines.base import EngineInfo, TokenChunk
from polar.engines.token_server import TokenServer
from polar.engines.vllm_probing import probe_vllm
from polar.engines.vllm_render import read_reply, render_prompt
from polar.engines.vllm_wire import BODIES, TokensReader


class VLLMEngine(TokenServer):
    """A vLLM server: a token engine and a rendering engine where it can be, and always a chat engine. The arguments
    are those of ``TokenServer``."""

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

    async def _asked(self, info: EngineInfo) -> EngineInfo:
        info = replace(info, kind="vllm")  # whatever it calls itself: the user says so
        self.capabilities = await probe_vllm(self._upstream, info)
        return info
