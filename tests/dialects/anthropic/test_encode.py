"""Replies, whole and streamed, in the shapes that the vendor's clients rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.capture.match import message_key
from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta
from polar.dialects.anthropic import AnthropicMessages
from polar.dialects.base import CallError
from tests.dialects.anthropic.conftest import OMITTED, THINKING, answer, encoded, parse

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
WHOLE = Message(
    "assistant",
    "I will look.",
    reasoning="hm",
    tool_calls=(ToolCall("c1", "bash", '{"command": "ls", "timeout": 9000.0}'), ToolCall("c2", "bash", "")),
)


# ---- whole replies ---------------------------------------------------------------------------------------


def test_a_reply_has_thinking_then_text_then_calls_and_real_counts() -> None:
    body = encoded(answer(WHOLE, "tool_calls"), thinking=THINKING)
    thinking, text, one, two = body.pop("content")
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": "hm"}
    assert text == {"type": "text", "text": "I will look."}
    assert one == {"type": "tool_use", "id": "c1", "name": "bash", "input": {"command": "ls", "timeout": 9000.0}}
    assert two == {"type": "tool_use", "id": "c2", "name": "bash", "input": {}}
    assert body == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "any-model",
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 5,
        },
    }


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
        ("tool_calls", None, "tool_use", None),
        ("tool_calls", "END", "tool_use", None),
        ("abort", None, "end_turn", None),
    ],
)
def test_stop_reasons(finish, stop, reason, sequence) -> None:
    """D18."""
    body = encoded(answer(Message("assistant", "x"), finish, stop_sequence=stop))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thinking_that_was_not_asked_for_is_not_in_the_reply(thinking) -> None:
    body = encoded(answer(WHOLE, "tool_calls"), thinking=thinking)
    assert [block["type"] for block in body["content"]] == ["text", "tool_use", "tool_use"]


def test_thinking_that_the_client_wants_without_its_text_is_an_empty_signed_block() -> None:
    body = encoded(answer(WHOLE, "tool_calls"), thinking={"type": "adaptive", "display": "omitted"})
    assert body["content"][0]["thinking"] == ""
    assert body["content"][0]["signature"]


ARGUMENTS = st.one_of(
    st.text(),
    st.dictionaries(st.text(), st.integers() | st.floats() | st.text() | st.lists(st.none())).map(json.dumps),
    st.text().map(lambda raw: json.dumps({"__unparsedToolInput": {"raw": raw}})),
)
REPLIES = st.builds(
    lambda text, reasoning, calls: Message(
        "assistant",
        text,
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(f"c{index}", "bash", arguments) for index, arguments in enumerate(calls)),
    ),
    st.text(),
    st.text(),
    st.lists(ARGUMENTS, max_size=3),
)


def _normal(message: Message) -> Message:
    """No arguments at all mean the empty object."""
    calls = tuple(ToolCall(c.id, c.name, c.arguments if c.arguments.strip() else "{}") for c in message.tool_calls)
    return Message(message.role, message.content, reasoning=message.reasoning, tool_calls=calls)


@pytest.mark.parametrize("thinking", [THINKING, OMITTED], ids=["shown", "omitted"])
@given(REPLIES)
@example(Message("assistant", tool_calls=(ToolCall("c0", "bash", '{"value": '),)))
@example(Message("assistant", tool_calls=(ToolCall("c0", "bash", '{"a": "b"c"}'),)))
@example(Message("assistant", tool_calls=(ToolCall("c0", "bash", '{"a": "\\ud800"}'),)))
@settings(max_examples=120, deadline=None)
def test_a_reply_that_comes_back_says_what_was_sampled(thinking, message) -> None:
    """D12, D19: input is an object whatever was sampled, and the same raw text when it comes back; and so is the
    thinking, where the client was given its signature alone."""
    content = encoded(answer(message), thinking=thinking)["content"]
    assert all(isinstance(block["input"], dict) for block in content if block["type"] == "tool_use")
    [again] = parse({"role": "assistant", "content": content}).chat.messages
    assert message_key(again) == message_key(_normal(message))
    assert again.reasoning == message.reasoning
    for ours, theirs in zip(_normal(message).tool_calls, again.tool_calls, strict=True):
        assert ours.id == theirs.id
        try:
            assert json.loads(theirs.arguments) == json.loads(ours.arguments)
        except ValueError:
            assert theirs.arguments == ours.arguments


# ---- streams ---------------------------------------------------------------------------------------------


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each has its type in its own line, too."""
    found = []
    for piece in data.split(b"\n\n")[:-1]:
        kind, body = piece.split(b"\n")
        found.append(json.loads(body.removeprefix(b"data: ")))
        assert kind == b"event: " + found[-1]["type"].encode()
    return found


def deltas_of(message: Message) -> list[Delta]:
    """A message cut into single characters, with its calls' arguments taking turns."""
    deltas: list[Delta] = [ReasoningDelta(c) for c in message.reasoning or ""]
    deltas += [TextDelta(c) for c in message.content]
    deltas += [ToolCallDelta(i, "", call.id, call.name) for i, call in enumerate(message.tool_calls)]
    longest = max((len(call.arguments) for call in message.tool_calls), default=0)
    for place in range(longest):
        deltas += [
            ToolCallDelta(i, c.arguments[place]) for i, c in enumerate(message.tool_calls) if place < len(c.arguments)
        ]
    return deltas


def streamed(deltas: list[Delta], reply, **fields: Any) -> bytes:
    encoder = AnthropicMessages().stream(parse(stream=True, **fields))
    pieces = [encoder.start(reply.completion_id, reply.created, reply.model, reply.usage.prompt_tokens)]
    pieces += [encoder.delta(delta) for delta in deltas]
    return b"".join([*pieces, encoder.finish(reply)])


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds, strict about the order of events (D9)."""
    found = [event for event in found if event["type"] != "ping"]
    assert found[0]["type"] == "message_start"
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message = found[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    current: dict[str, Any] | None = None
    arguments = ""
    for event in found[1:-2]:
        if event["type"] == "content_block_start":
            assert current is None
            assert event["index"] == len(message["content"])
            current, arguments = event["content_block"], ""
            continue
        assert current is not None
        assert event["index"] == len(message["content"])
        if event["type"] == "content_block_stop":
            if current["type"] == "tool_use":
                current["input"] = json.loads(arguments)
            assert current.get("signature", "signed")
            message["content"].append(current)
            current = None
            continue
        delta = event["delta"]
        assert not current.get("signature")
        match delta["type"], current["type"]:
            case ("text_delta", "text"):
                current["text"] += delta["text"]
            case ("thinking_delta", "thinking"):
                current["thinking"] += delta["thinking"]
            case ("signature_delta", "thinking"):
                current["signature"] = delta["signature"]
            case ("input_json_delta", "tool_use"):
                arguments += delta["partial_json"]
            case other:
                raise AssertionError(other)
    assert current is None
    return {**message, **found[-2]["delta"], "usage": found[-2]["usage"]}


@pytest.mark.parametrize("thinking", [None, THINKING, OMITTED], ids=["hidden", "shown", "omitted"])
@given(REPLIES)
@settings(max_examples=60, deadline=None)
def test_a_stream_is_the_whole_reply_in_pieces(thinking, message) -> None:
    reply = answer(message, "tool_calls" if message.tool_calls else "stop")
    found = events(streamed(deltas_of(message), reply, thinking=thinking))
    assert put_together(found) == encoded(reply, thinking=thinking)


def test_the_first_event_has_the_real_prompt_length_and_no_null_count() -> None:
    """D18."""
    found = events(streamed([TextDelta("x")], answer(Message("assistant", "x"))))
    start, end = found[0]["message"]["usage"], found[-2]["usage"]
    assert start["input_tokens"] == 10
    assert end["input_tokens"] + end["cache_read_input_tokens"] == 10
    assert end["output_tokens"] == 5
    assert None not in (*start.values(), *end.values())


def test_thinking_after_text_is_a_block_of_its_own() -> None:
    deltas = [TextDelta("a"), ReasoningDelta("b"), TextDelta("c")]
    message = Message("assistant", "ac", reasoning="b")
    body = put_together(events(streamed(deltas, answer(message), thinking=THINKING)))
    assert [block["type"] for block in body["content"]] == ["text", "thinking", "text"]
    [again] = parse({"role": "assistant", "content": body["content"]}).chat.messages
    assert again == message


def test_each_block_of_omitted_thinking_is_signed_for_its_own() -> None:
    deltas = [ReasoningDelta("a"), ReasoningDelta(""), ReasoningDelta("b"), TextDelta("c"), ReasoningDelta("d")]
    message = Message("assistant", "c", reasoning="abd")
    body = put_together(events(streamed(deltas, answer(message), thinking=OMITTED)))
    assert [block.get("thinking") for block in body["content"]] == ["", None, ""]
    [again] = parse({"role": "assistant", "content": body["content"]}).chat.messages
    assert again == message


def test_what_is_held_back_or_hidden_is_a_sign_of_life(dialect) -> None:
    encoder = dialect.stream(parse())
    encoder.start("abc", 1.5, "m", 3)
    assert encoder.delta(ReasoningDelta("hm")) == PING
    assert encoder.delta(ToolCallDelta(0, '{"command"')) == PING
    assert encoder.delta(TextDelta("")) == b""


def test_a_keepalive_is_a_comment_until_the_message_has_begun(dialect) -> None:
    encoder = dialect.stream(parse())
    assert encoder.keepalive.startswith(b":")
    encoder.start("abc", 1.5, "m", 3)
    assert encoder.keepalive == PING


def test_an_error_in_a_stream_is_an_error_event(dialect) -> None:
    """C8."""
    data = dialect.stream(parse()).error(CallError("overloaded", "try again"))
    assert events(data) == [{"type": "error", "error": {"type": "overloaded_error", "message": "try again"}}]


# ---- errors and side routes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "name", "final"),
    [
        ("bad_request", 400, "invalid_request_error", True),
        ("unauthorized", 401, "authentication_error", True),
        ("not_found", 404, "not_found_error", True),
        ("conflict", 400, "invalid_request_error", True),
        ("gone", 410, "invalid_request_error", True),
        ("too_large", 413, "request_too_large", True),
        ("context_length", 400, "invalid_request_error", True),
        ("overloaded", 503, "overloaded_error", False),
        ("unavailable", 502, "api_error", False),
        ("internal", 500, "api_error", False),
    ],
)
def test_errors_have_the_vendors_types_and_final_ones_say_so(dialect, kind, status, name, final) -> None:
    response = dialect.error(CallError(kind, "words"))
    body = json.loads(response.body)
    assert response.status == status
    assert body["type"] == "error"
    assert body["error"]["type"] == name
    assert "words" in body["error"]["message"]
    assert response.headers.get("x-should-retry") == ("false" if final else None)


def test_a_prompt_over_the_context_is_told_in_the_words_that_make_claude_code_compact(dialect) -> None:
    """D17."""
    error = CallError("context_length", "no", prompt_tokens=208310, max_tokens=200000)
    message = json.loads(dialect.error(error).body)["error"]["message"]
    assert message == "prompt is too long: 208310 tokens > 200000 maximum"
    unknown = json.loads(dialect.error(CallError("context_length", "no")).body)["error"]["message"]
    assert unknown.startswith("prompt is too long")


def test_an_overloaded_engine_says_when_to_try_again(dialect) -> None:
    assert dialect.error(CallError("overloaded", "x", retry_after=1.0)).headers["retry-after"] == "1.0"


def test_counts_and_models(dialect) -> None:
    assert json.loads(dialect.count(123).body) == {"input_tokens": 123}
    assert json.loads(dialect.model("m").body)["type"] == "model"
    listed = json.loads(dialect.models(["a", "b"]).body)
    assert [model["id"] for model in listed["data"]] == ["a", "b"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert json.loads(dialect.models([]).body)["data"] == []
