"""What we ask of an engine: the client's conversation and sampling, and our own settings on top."""

from __future__ import annotations

from typing import Any

import pytest

from polar.contract.chat import Chat, Image, Message, Sampling, Text, Tool, ToolCall
from polar.engines.openai_request import request_body


def body(chat: Chat, **options: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"kind": "vllm", "model": "served", "context_length": 2048, "stream": True}
    return request_body(chat, **(settings | options))


def test_the_served_model_and_our_own_settings_whatever_the_client_asked() -> None:
    sent = body(Chat(model="claude-opus", messages=(Message("user", "Hi"),)))
    assert sent == {
        "model": "served",
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_whole_reply_has_no_stream_options() -> None:
    sent = body(Chat(model="m", messages=()), stream=False)
    assert sent["stream"] is False
    assert "stream_options" not in sent


def test_sglang_gets_the_fields_that_it_takes_on_a_stream() -> None:
    sent = body(Chat(model="m", messages=()), kind="sglang")
    assert sent["return_input_ids_in_sglext"] is True
    assert sent["return_output_ids_in_sglext"] is True
    assert "return_token_ids" not in sent


def test_messages_with_parts_reasoning_calls_and_results() -> None:
    chat = Chat(
        model="m",
        messages=(
            Message("user", (Text("look"), Image("data:image/png;base64,AA=="))),
            Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c1", "f", '{"broken'),)),
            Message("tool", "4", tool_call_id="c1", name="f"),
            Message("assistant", "done"),
        ),
    )
    assert body(chat)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"broken'}}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("sampled", "sent"),
    [
        (r'{"a": "\ud83d"}', r'{"a": "\ufffd"}'),
        (r'{"a": "\ud83d\ude00 \uD83D x \u00e9"}', r'{"a": "\ud83d\ude00 \ufffd x \u00e9"}'),
        (r'{"a": "\\ud83d"}', r'{"a": "\\ud83d"}'),
        (r'{"a": "\ude00', r'{"a": "\ufffd'),
    ],
)
def test_d12_half_characters_in_arguments_are_not_sent(sampled: str, sent: str) -> None:
    chat = Chat(model="m", messages=(Message("assistant", "", tool_calls=(ToolCall("c1", "f", sampled),)),))
    [message] = body(chat)["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == sent


def test_tools_and_a_choice_among_them() -> None:
    tool = Tool("f", "does f", {"type": "object"}, strict=True)
    sent = body(Chat(model="m", messages=(), tools=(tool, Tool("g")), tool_choice="f"))
    assert sent["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": True},
        },
        {"type": "function", "function": {"name": "g"}},
    ]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body(Chat(model="m", messages=(), tools=(tool,), tool_choice="required"))["tool_choice"] == "required"


def test_a_tool_choice_without_tools_is_dropped() -> None:
    sent = body(Chat(model="m", messages=(), tool_choice="auto"))
    assert "tools" not in sent
    assert "tool_choice" not in sent


def test_all_of_sampling() -> None:
    asked: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "max_tokens": 64,
        "seed": 0,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
    }
    sent = body(Chat(model="m", messages=(), sampling=Sampling(**asked, stop=("a", "b"), logit_bias={5: -100.0})))
    assert {name: sent[name] for name in asked} == asked
    assert sent["stop"] == ["a", "b"]
    assert sent["logit_bias"] == {"5": -100.0}


def test_response_format_and_template_arguments() -> None:
    chat = Chat(
        model="m", messages=(), response_format={"type": "json_object"}, template_args={"enable_thinking": False}
    )
    sent = body(chat)
    assert sent["response_format"] == {"type": "json_object"}
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_limit_that_is_no_limit_is_left_to_the_engine() -> None:
    chat = Chat(model="m", messages=(), sampling=Sampling(max_tokens=64000))
    assert "max_tokens" not in body(chat, context_length=20000)
    assert body(chat, context_length=0)["max_tokens"] == 64000
