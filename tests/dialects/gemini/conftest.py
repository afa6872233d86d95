"""The gateway of the gateway's own tests, and requests and replies in Gemini's shape."""

from __future__ import annotations

import json
from typing import Any

from google import genai
from google.genai import types

from polar.contract.chat import Delta, FinishReason, Message, Usage
from polar.dialects.base import Answer, Call
from polar.dialects.gemini import Gemini
from tests.gateway.conftest import World, make_world, tiny_model

__all__ = ["make_world", "tiny_model"]

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "parametersJsonSchema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4)
STREAM = {"model": "m", "verb": "streamGenerateContent", "alt": "sse"}


def client(world: World, **options: Any) -> genai.Client:
    options = {"base_url": world.node.server.url, **options}
    return genai.Client(api_key=world.session.key, http_options=types.HttpOptions(**options))


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def model(*parts: Any) -> dict[str, Any]:
    return {**user(*parts), "role": "model"}


def parse(*contents: dict[str, Any], path: dict[str, str] | None = None, **fields: Any) -> Call:
    body = {"contents": list(contents) or [user("hi")], **fields}
    return Gemini().parse(json.dumps(body).encode(), {}, path or {"model": "m", "verb": "generateContent"})


def answer(message: Message, finish_reason: FinishReason = "stop", *, usage: Usage = USAGE) -> Answer:
    return Answer("abc", 1.5, "any-model", message, finish_reason, None, usage)


def thoughts(shown: bool) -> dict[str, Any]:
    return {"generationConfig": {"thinkingConfig": {"includeThoughts": shown}}}


def encoded(reply: Answer, *, shown: bool = True) -> dict[str, Any]:
    response = Gemini().encode(parse(**thoughts(shown)), reply)
    assert response.status == 200
    return json.loads(response.body)


def streamed(reply: Answer, deltas: list[Delta], *, shown: bool = True, sse: bool = True) -> bytes:
    path = STREAM if sse else {**STREAM, "alt": ""}
    encoder = Gemini().stream(parse(path=path, **thoughts(shown)))
    out = [encoder.start("abc", 1.5, "any-model", 10), *(encoder.delta(delta) for delta in deltas)]
    return b"".join([*out, encoder.finish(reply)])


def events(data: bytes) -> list[dict[str, Any]]:
    """The chunks of an event stream, read as Gemini CLI reads it: nothing but one-line ``data:`` blocks."""
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and len(block.splitlines()) == 1 for block in blocks), blocks
    return [json.loads(block[6:]) for block in blocks]


def parts_of(*responses: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for response in responses for part in response["candidates"][0]["content"]["parts"]]
