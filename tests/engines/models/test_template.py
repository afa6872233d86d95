"""The chat template with tools that fetched models get."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
RAW_CALL = {"type": "function", "id": "c2", "function": {"name": "add", "arguments": '{"a":1 '}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and two?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "Again.", "tool_calls": [RAW_CALL, CALL]},
    {"role": "tool", "tool_call_id": "c2", "content": "bad JSON"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    {"role": "system", "content": "Stay brief."},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": [{"type": "text", "text": "Tha"}, {"type": "text", "text": "nks"}]},
]


def render(messages: list[Message], tools: list[Any] | None = None, prompt: bool = False) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    text = resources.files("polar.engines").joinpath("templates/chatml_tools.jinja").read_text("utf-8")
    return environment.from_string(text).render(messages=messages, tools=tools, add_generation_prompt=prompt)


def test_plain_chat_adds_nothing_of_its_own() -> None:
    assert render([{"role": "user", "content": "Hi"}], prompt=True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render([], prompt=True) == "<|im_start|>assistant\n"


def test_tools_stand_in_the_system_turn_with_or_without_a_system_message() -> None:
    with_system, without = render(CONVERSATION[:2], TOOLS), render(CONVERSATION[1:2], TOOLS)
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert without.startswith("<|im_start|>system\n# Tools\n")
    for text in (with_system, without):
        assert text.count("<|im_start|>system") == 1
        assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text


def test_calls_and_results_have_their_markup() -> None:
    text = render(CONVERSATION)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n" in text
    assert f'Again.\n<tool_call>\n{{"name": "add", "arguments": {{"a":1 }}\n</tool_call>\n{call}<|im_end|>\n' in text
    assert (
        "<|im_start|>user\n<tool_response>\nbad JSON\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>system\nStay brief.<|im_end|>\n"
    ) in text
    assert text.endswith("<|im_start|>user\nThanks<|im_end|>\n")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_conversation_begins_with_the_rendering_of_its_start(tools: list[Any] | None) -> None:
    for n in range(1, len(CONVERSATION)):
        more = render(CONVERSATION[: n + 1], tools)
        if CONVERSATION[n]["role"] == CONVERSATION[n - 1]["role"] == "tool":
            continue
        assert more.startswith(render(CONVERSATION[:n], tools))
        if CONVERSATION[n]["role"] == "assistant":
            assert more.startswith(render(CONVERSATION[:n], tools, prompt=True))
