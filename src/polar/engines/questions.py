"""Why: what a server can do is found by asking it, with real calls of a few tokens, read by the readers that will
read the work. This is what all such questions share. One that fails in any way is a "no"; none that is answered at
all is an error.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polar.contract.chat import Chat, Message, Sampling
from polar.contract.errors import UsageError
from polar.engines.base import EngineError, EngineInfo
from polar.engines.http import NoAnswer, Upstream
from polar.engines.openai_reply import ReplyReader
from polar.engines.openai_request import request_body

PROMPT = (1, 2, 3)
TOKENS = 4
HOT = 2.0
"""A temperature at which logprobs differ by far more than by arithmetic, before and after it is applied."""
SAME = 0.2
"""Nats. Sampling and scoring the same token differ by up to 0.05 in bfloat16."""
CHAT = "/v1/chat/completions"
_SECONDS = 120.0
"""A server's first call may take long, and a paused one does not answer at all."""
_REFUSED = (400, 422)
_NAMED = {"X-Request-Id": "polar-probe"}
"""So that a log tells the questions from the work."""


class Questions:
    """What is asked of any server."""

    def __init__(self, upstream: Upstream, info: EngineInfo) -> None:
        self._upstream = upstream
        self._info = info

    async def chat_ids(self) -> bool:
        """A chat is answered with the ids of prompt and reply."""
        status, reply = await self._chat()
        try:
            reader = ReplyReader(self._upstream.url + CHAT, require_token_ids=True)
            reader.feed(reply)
            reader.finish()
        except EngineError:
            return False
        return status == 200

    async def refuses_to_be_asked(self) -> bool:
        """It answers a chat, but not one that asks for token ids."""
        if (await self._chat())[0] not in _REFUSED:
            return False
        return (await self._chat(ask_ids=False))[0] == 200

    async def _chat(self, *, ask_ids: bool = True) -> tuple[int, bytes]:
        asked = Chat("", (Message("user", "Hi"),), sampling=Sampling(max_tokens=1))
        kind, model = self._info.kind, self._info.model
        return await self._ask(
            CHAT, request_body(asked, kind=kind, model=model, context_length=0, stream=False, ask_ids=ask_ids)
        )

    async def _json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The JSON object that it answers; empty if it answers none."""
        status, reply = await self._ask(path, body)
        try:
            told = msgspec.json.decode(reply) if status == 200 else None
        except msgspec.DecodeError:
            told = None
        return told if isinstance(told, dict) else {}

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body; 0 if the question could not be asked.

        Raises:
            UsageError: it does not answer in two minutes.
        """
        try:
            return await self._upstream.ask(path, body, seconds=_SECONDS, headers=_NAMED)
        except NoAnswer as error:
            raise UsageError(f"{error}, a call of a few tokens: is the engine paused?") from None
        except EngineError:
            return 0, b""
