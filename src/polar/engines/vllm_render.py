"""Why: where a model's tokenizer is only at the engine's, the engine can still turn a chat into ids and ids into a
message, apart from sampling. It is the model's real template and vLLM's own parsers, for one more call each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import Ids
from polar.contract.chat import Chat, FinishReason, Message, Sampling
from polar.engines.http import Upstream
from polar.engines.openai_deltas import DeltaReader, WireDelta
from polar.engines.openai_errors import error_of_reply
from polar.engines.openai_request import request_body
from polar.engines.sampled import decode

_RENDER = "/v1/chat/completions/render"
_READ = "/v1/chat/completions/derender"
_SECONDS = 60.0


class WirePrompt(msgspec.Struct):
    token_ids: list[int]


class WireChoice(msgspec.Struct):
    message: WireDelta


class WireReply(msgspec.Struct):
    choices: list[WireChoice]


_prompts = msgspec.json.Decoder(WirePrompt)
_replies = msgspec.json.Decoder(WireReply)


async def render_prompt(upstream: Upstream, chat: Chat, model: str) -> Ids:
    """The prompt's ids (int32).

    Raises:
        EngineError: see ``RenderingEngine.render``.
    """
    body = await _ask(upstream, _RENDER, _chat_body(chat, model))
    return np.array(decode(body, _prompts, upstream.url + _RENDER, "rendered prompt").token_ids, dtype=np.int32)


async def read_reply(
    upstream: Upstream, chat: Chat, model: str, prompt: Ids, ids: Sequence[int], finish_reason: FinishReason
) -> Message:
    """The reply's message.

    Raises:
        EngineError: see ``RenderingEngine.read``.
    """
    choice = {"index": 0, "finish_reason": finish_reason, "token_ids": list(ids), "logprobs": None}
    asked = {
        "model": model,
        "generate_response": {"request_id": "reply", "choices": [choice]},
        "prompt_token_ids": np.ascontiguousarray(prompt),
        "chat_request": _chat_body(chat, model),
    }
    reply = decode(await _ask(upstream, _READ, asked), _replies, upstream.url + _READ, "message")
    reader = DeltaReader()
    for found in reply.choices[:1]:
        reader.feed(found.message)
    return reader.message()


def _chat_body(chat: Chat, model: str) -> dict[str, Any]:
    """What the prompt depends on. A choice of tool is not among it: the grammar behind one is the sampler's."""
    plain = msgspec.structs.replace(chat, sampling=Sampling(), response_format=None, tool_choice=None)
    return request_body(plain, kind="vllm", model=model, context_length=0, stream=False)


async def _ask(upstream: Upstream, path: str, body: dict[str, Any]) -> bytes:
    status, reply = await upstream.ask(path, body, seconds=_SECONDS)
    if status != 200:
        raise error_of_reply(status, reply, upstream.url + path)
    return reply
