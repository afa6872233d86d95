"""The gateway of the gateway's own tests, and requests and replies in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from polar.contract.chat import FinishReason, Message, Usage
from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import Answer, Call
from tests.gateway.conftest import World, make_world, tiny_model

__all__ = ["make_world", "tiny_model"]

BASH = {
    "name": "bash",
    "description": "Run a command.",
    "input_schema": {
        "type": "object",
        "properties": {"timeout": {"type": "number"}, "command": {"type": "string"}},
        "required": ["command"],
    },
}
THINKING = {"type": "enabled", "budget_tokens": 1024}
OMITTED = {"type": "adaptive", "display": "omitted"}
USAGE = Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=4)


def client(world: World, **options: Any) -> anthropic.AsyncAnthropic:
    options = {"max_retries": 0, "api_key": world.session.key, **options}
    return anthropic.AsyncAnthropic(base_url=world.node.server.url, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def parse(*messages: dict[str, Any], headers: dict[str, str] | None = None, **fields: Any) -> Call:
    body = {"model": "m", "max_tokens": 64, "messages": list(messages) or [user("hi")], **fields}
    return AnthropicMessages().parse(json.dumps(body).encode(), headers or {}, {})


def answer(
    message: Message,
    finish_reason: FinishReason = "stop",
    *,
    stop_sequence: str | None = None,
    usage: Usage = USAGE,
) -> Answer:
    return Answer("abc", 1.5, "any-model", message, finish_reason, stop_sequence, usage)


def encoded(reply: Answer, **fields: Any) -> dict[str, Any]:
    response = AnthropicMessages().encode(parse(**fields), reply)
    assert response.status == 200
    return json.loads(response.body)


@pytest.fixture
def dialect() -> AnthropicMessages:
    return AnthropicMessages()
