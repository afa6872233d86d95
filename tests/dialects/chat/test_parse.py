"""A conversation is sent again with every call: what was read before must read the same, wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.contract.chat import Chat, Message, ToolCall
from polar.dialects.base import CallError
from polar.dialects.openai_chat import OpenAIChat


def parse(messages: list[Any]) -> Chat:
    return OpenAIChat().parse(json.dumps({"model": "m", "messages": messages}).encode(), {}, {}).chat


def call(call_id: str | None, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}} | (
        {"id": call_id} if call_id else {}
    )


def test_messages_that_differ_in_anything_are_never_taken_for_each_other() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "a"},
        {"role": "user", "content": "a", "name": "n"},
        {"role": "assistant", "content": "a", "tool_calls": [call("x", "{}")]},
        {"role": "assistant", "content": "a", "tool_calls": [call("y", "{}")]},
        {"role": "assistant", "content": "a", "reasoning": "r"},
    ]
    expected = (
        Message("user", "a"),
        Message("system", "a"),
        Message("user", "a", name="n"),
        Message("assistant", "a", tool_calls=(ToolCall("x", "f", "{}"),)),
        Message("assistant", "a", tool_calls=(ToolCall("y", "f", "{}"),)),
        Message("assistant", "a", reasoning="r"),
    )
    assert parse(messages).messages == expected
    assert parse(messages[::-1]).messages == expected[::-1]


def test_a_message_that_is_refused_is_named_by_its_place_and_refused_again() -> None:
    good = {"role": "user", "content": "a"}
    for place in (1, 2):
        with pytest.raises(CallError, match=rf"\$\.messages\[{place}\]\.content"):
            parse([good] * place + [{"role": "user", "content": 3}])
    with pytest.raises(CallError, match=r"\$\.messages\[0\]"):
        parse([3])


def test_a_conversation_of_many_megabytes_is_read_whole_twice() -> None:
    texts = [f"{number} " + "x" * 200_000 for number in range(400)]
    messages = [{"role": "user", "content": text} for text in texts]
    for _ in range(2):
        assert [message.content for message in parse(messages).messages] == texts
