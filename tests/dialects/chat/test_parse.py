"""What a Chat request means. A conversation is sent again with every call: what was read before must read the same,
wherever it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.contract.chat import Chat, Message, ToolCall
from polar.dialects.base import Call, CallError
from polar.dialects.openai_chat import OpenAIChat


def parse(messages: list[Any]) -> Chat:
    return OpenAIChat().parse(json.dumps({"model": "m", "messages": messages}).encode(), {}, {}).chat


def asked(**fields: Any) -> Call:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return OpenAIChat().parse(json.dumps(body).encode(), {}, {})


BASH: dict[str, Any] = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


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


def test_calls_of_custom_tools_and_from_before_there_were_tools_are_calls() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'say "x"'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [custom]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
    ]
    patched, _, called, result = parse(messages).messages
    assert patched.tool_calls == (ToolCall("c", "patch", '{"input":"say \\"x\\""}'),)
    assert [(said.name, said.arguments) for said in called.tool_calls] == [("f", "{}")]
    assert (result.role, result.tool_call_id) == ("tool", called.tool_calls[0].id)


def test_a_call_of_nothing_is_named_by_its_place() -> None:
    with pytest.raises(CallError, match=r"\$\.messages\[0\]\.tool_calls"):
        parse([{"role": "assistant", "tool_calls": [{"id": "x"}]}])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "'n'"),
        ({"n": 0}, "'n'"),
        ({"functions": [{"name": "f"}]}, "'tools'"),
        ({"top_logprobs": 2}, "'logprobs'"),
        ({"max_tokens": 0}, "'max_tokens'"),
        ({"max_tokens": -1}, "'max_tokens'"),
        ({"max_completion_tokens": 0, "max_tokens": 5}, "'max_completion_tokens'"),
        ({"tools": [BASH], "tool_choice": {"type": "function"}}, "'tool_choice'"),
        ({"tools": [BASH], "tool_choice": "any"}, "tool_choice"),
    ],
    ids=str,
)
def test_what_would_be_another_reply_is_refused_and_named(fields, words) -> None:
    with pytest.raises(CallError) as caught:
        asked(**fields)
    assert caught.value.kind == "bad_request"
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [BASH], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [BASH], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "'custom'"),
        ({"tools": [BASH, {"type": "custom", "custom": {"name": "x"}}]}, "'custom'"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy"}}, "audio"),
        ({"verbosity": "low"}, "verbosity"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"made_up": 1}, "made_up"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]}, "last message"),
    ],
    ids=str,
)
def test_what_can_not_be_honoured_is_named_in_one_warning(fields, named) -> None:
    [warning] = asked(**fields).warnings
    assert named in warning


def test_what_changes_no_reply_is_no_warning() -> None:
    quiet = {"user": "u", "store": False, "metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "auto"}
    quiet |= {"modalities": ["text"], "tools": [BASH], "tool_choice": "auto", "parallel_tool_calls": True}
    quiet |= {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": None, "verbosity": None}
    assert asked(**quiet).warnings == ()


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "function": {"name": "bash"}}, "bash"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [BASH]}}, "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [BASH]}}, "auto"),
        ({"type": "custom", "custom": {"name": "x"}}, None),
    ],
    ids=str,
)
def test_tool_choice(choice, meant) -> None:
    assert asked(tools=[BASH], tool_choice=choice).chat.tool_choice == meant
    assert asked(tools=[], tool_choice=choice).chat.tool_choice is None


def test_effort_reaches_the_template_and_the_templates_own_words_win() -> None:
    assert asked(reasoning_effort="minimal").chat.template_args == {"reasoning_effort": "low"}
    assert asked(reasoning_effort="none").chat.template_args == {"enable_thinking": False}
    own = asked(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "a": 1})
    assert own.chat.template_args == {"enable_thinking": True, "a": 1}


def test_the_newer_limit_wins() -> None:
    assert asked(max_tokens=9, max_completion_tokens=7).chat.sampling.max_tokens == 7
    assert asked(max_tokens=9).chat.sampling.max_tokens == 9
