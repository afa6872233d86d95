"""The gateway of the gateway's own tests, and requests and replies in the shapes of the Responses API."""

from __future__ import annotations

import json
from typing import Any

from polar.contract.chat import FinishReason, Message, Usage
from polar.dialects.base import Answer, Call
from polar.dialects.openai_responses import OpenAIResponses
from tests.gateway.conftest import make_world, tiny_model

__all__ = ["make_world", "tiny_model"]

BASH = {
    "type": "function",
    "name": "bash",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Apply a patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4)


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def parse(*items: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> Call:
    body = {"model": "m", "input": list(items) or [user("hi")], **fields}
    return OpenAIResponses().parse(json.dumps(body).encode(), headers or {}, {})


def answer(message: Message, finish_reason: FinishReason = "stop") -> Answer:
    return Answer("abc", 1.5, "any-model", message, finish_reason, None, USAGE)


def encoded(reply: Answer, **fields: Any) -> dict[str, Any]:
    response = OpenAIResponses().encode(parse(**fields), reply)
    assert response.status == 200
    return json.loads(response.body)
