"""A harness that speaks every API says who calls in a header of its own: it is read in each of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import Dialect
from polar.dialects.gemini import Gemini
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses

SAID = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[Dialect, dict[str, Any]]] = [
    (OpenAIChat(), {"model": "m", "messages": SAID}),
    (OpenAIResponses(), {"model": "m", "input": SAID}),
    (AnthropicMessages(), {"model": "m", "max_tokens": 8, "messages": SAID}),
    (Gemini(), {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
]


@pytest.mark.parametrize(("dialect", "body"), BODIES, ids=[dialect.name for dialect, _ in BODIES])
def test_a_session_that_was_sent_by_another_is_a_sub_agent_s(dialect: Dialect, body: dict[str, Any]) -> None:
    path = {"model": "m", "method": "generateContent"}
    hints = [
        dialect.parse(json.dumps(body).encode(), headers, path).role_hint
        for headers in ({}, {"x-session-id": "child"}, {"x-session-id": "child", "x-parent-session-id": "parent"})
    ]
    assert hints == [None, None, "subagent"]
