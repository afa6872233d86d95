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
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from polar.engines.http import Answer
from polar.engines.sglang_probing import probe_sglang
from polar.engines.sglang_reply import ROUTE, GenerateReader
from polar.engines.sglang_request import request_body
from polar.engines.sglang_server import ask_server
from polar.engines.token_server import TokenServer

_ABORT_SECONDS = 5.0


class SGLangEngine(TokenServer):
    """An SGLang server (not a router before some): a token engine where it can be, and always a chat engine. The
    arguments are those of ``TokenServer``."""

    # Its scheduler answers these by itself, paused or not, between two steps. ``/v1/models`` is answered where the
    # scheduler hangs, too; ``/health`` and ``/health_generate`` take a second, and not while the server is paused:
    # they sample a token, and every update of the weights would look like a failure.
    _health_paths = ("/server_info", "/get_server_info")
    _health_seconds = 30.0
    _incremental = False
    """Its stream tells only what is new, and not all of the reply so far each time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._aborts: set[asyncio.Task[None]] = set()

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

    async def _asked(self, info: EngineInfo) -> EngineInfo:
        server = await ask_server(self._upstream, info.model)
        self._incremental = server.incremental
        tokenizer = server.tokenizer_path
        info = replace(info, kind="sglang", version=server.version, model_path=tokenizer, tokenizer=tokenizer)
        self.capabilities = await probe_sglang(self._upstream, info)
        if not server.adapter:
            return info
        why = f"{info.model} is an adapter, and only the model it belongs to is sampled from by token ids"
        return replace(info, chat_only=why)

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
