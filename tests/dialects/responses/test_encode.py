"""Replies and streams in the Responses shape: what is sent, in which order, and that it can be sent back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from polar.capture.match import message_key, reasoning_agrees
from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta
from polar.dialects.base import Answer, CallError
from polar.dialects.openai_responses import OpenAIResponses
from tests.dialects.responses.conftest import AGENTS, BASH, PATCH, USAGE, answer, encoded, parse, user

TOOLS = [BASH, AGENTS, PATCH]
FULL = Message(
    "assistant",
    "I look.",
    reasoning="hm",
    tool_calls=(
        ToolCall("a", "bash", '{"command": "ls"}'),
        ToolCall("b", "agents__spawn", "{}"),
        ToolCall("c", "apply_patch", '{"input": "*** Begin"}'),
    ),
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def deltas(message: Message, size: int = 3) -> list[Delta]:
    """The message in pieces."""

    def cut(text: str) -> list[str]:
        return [text[at : at + size] for at in range(0, len(text), size)]

    out: list[Delta] = [ReasoningDelta(text) for text in cut(message.reasoning or "")]
    out += [TextDelta(text) for text in cut(str(message.content))]
    for index, call in enumerate(message.tool_calls):
        out.append(ToolCallDelta(index, "", call.id, call.name))
        out += [ToolCallDelta(index, text) for text in cut(call.arguments)]
    return out


def events(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each has an event line that says its type, and comments are passed over."""
    out = []
    for block in data.decode().split("\n\n"):
        if not block or block.startswith(":"):
            continue
        head, body = block.split("\n")
        out.append(json.loads(body.removeprefix("data: ")))
        assert head == f"event: {out[-1]['type']}"
    return out


def streamed(reply: Answer, pieces: list[Delta] | None = None, **fields: Any) -> list[dict[str, Any]]:
    encoder = OpenAIResponses().stream(parse(stream=True, **fields))
    data = encoder.start("abc", 1.5, "any-model", 10)
    for piece in deltas(reply.message) if pieces is None else pieces:
        data += encoder.delta(piece)
    return events(data + encoder.finish(reply))


def types(found: list[dict[str, Any]]) -> list[str]:
    """Event types, runs of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [name for at, name in enumerate(names) if not (name.endswith("delta") and at and names[at - 1] == name)]


def test_a_reply_has_an_item_for_the_thinking_the_text_and_each_call() -> None:
    body = encoded(answer(FULL, "tool_calls"), tools=TOOLS)
    assert body["id"] == "resp_abc"
    assert (body["status"], body["error"], body["incomplete_details"]) == ("completed", None, None)
    thought, text, bash, spawn, patch = body["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert text["content"][0]["text"] == "I look."
    assert (bash["name"], bash["call_id"], bash["arguments"]) == ("bash", "a", '{"command": "ls"}')
    assert (spawn["namespace"], spawn["name"]) == ("agents", "spawn")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert len({item["id"] for item in body["output"]}) == 5
    assert body["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 15,
    }


def test_what_was_asked_is_repeated() -> None:
    fields = {"metadata": {"a": "b"}, "temperature": 0.5, "store": False, "instructions": "Be brief.", "tools": TOOLS}
    fields |= {"parallel_tool_calls": False, "tool_choice": "required", "max_output_tokens": 9}
    body = encoded(answer(Message("assistant", "ok")), **fields)
    assert {name: body[name] for name in fields} == fields


def test_a_reply_that_ran_out_of_tokens_is_incomplete() -> None:
    body = encoded(answer(Message("assistant", "Half"), "length"))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][-1]["status"] == "incomplete"
    last = streamed(answer(Message("assistant", "Half"), "length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["output"][-1]["status"] == "incomplete"


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', '{"input": 7}', '{"inp', ""])
def test_a_custom_call_that_is_not_as_asked_reaches_the_client_whole(arguments) -> None:
    message = Message("assistant", "", tool_calls=(ToolCall("c", "apply_patch", arguments),))
    [item] = encoded(answer(message, "tool_calls"), tools=TOOLS)["output"]
    assert item["input"] == arguments


def test_the_events_of_a_stream_are_in_strict_order() -> None:
    found = streamed(answer(FULL, "tool_calls"), tools=TOOLS)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    part = "content_part"
    assert types(found) == [
        "created",
        "in_progress",
        *("output_item.added", f"{part}.added", "reasoning_text.delta", "reasoning_text.done", f"{part}.done"),
        "output_item.done",
        *("output_item.added", f"{part}.added", "output_text.delta", "output_text.done", f"{part}.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    assert [e["output_index"] for e in found if e["type"] == "response.output_item.done"] == [0, 1, 2, 3, 4]


def test_every_event_is_what_the_vendors_types_say() -> None:
    for event in streamed(answer(FULL, "tool_calls"), tools=TOOLS):
        checked = EVENT.validate_python(event)
        assert checked.type == event["type"]
    Response.model_validate(encoded(answer(FULL, "tool_calls"), tools=TOOLS))


def test_no_call_has_ended_before_the_reply_is_durable() -> None:
    encoder = OpenAIResponses().stream(parse(stream=True, tools=TOOLS))
    sent = encoder.start("abc", 1.5, "m", 10) + b"".join(encoder.delta(delta) for delta in deltas(FULL))
    ended = [event["item"]["type"] for event in events(sent) if event["type"] == "response.output_item.done"]
    assert ended == ["reasoning", "message"]
    rest = events(encoder.finish(answer(FULL, "tool_calls")))
    ended = [event["item"]["call_id"] for event in rest if event["type"] == "response.output_item.done"]
    assert ended == ["a", "b", "c"]


def test_text_after_a_call_and_calls_in_turns_lose_nothing() -> None:
    message = Message("assistant", "AB", tool_calls=(ToolCall("a", "bash", "12"), ToolCall("b", "bash", "34")))
    pieces: list[Delta] = [TextDelta("A"), ToolCallDelta(0, "1", "a", "bash"), ToolCallDelta(1, "3", "b", "bash")]
    pieces += [ToolCallDelta(0, "2"), TextDelta("B"), ToolCallDelta(1, "4")]
    output = streamed(answer(message, "tool_calls"), pieces, tools=TOOLS)[-1]["response"]["output"]
    assert [item.get("arguments") or item["content"][0]["text"] for item in output] == ["A", "12", "B", "34"]


def test_an_empty_reply_is_an_empty_message() -> None:
    empty = answer(Message("assistant"))
    for output in (encoded(empty)["output"], streamed(empty)[-1]["response"]["output"]):
        assert [item["content"][0]["text"] for item in output] == [""]


def test_an_error_in_a_stream_is_a_failed_response_and_not_an_error_event() -> None:
    encoder = OpenAIResponses().stream(parse(stream=True))
    encoder.start("abc", 1.5, "m", 10)
    [failed] = events(encoder.error(CallError("unavailable", "The engine failed")))
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The engine failed"}
    never_begun = OpenAIResponses().stream(parse(stream=True))
    found = events(never_begun.error(CallError("context_length", "too long")))
    assert types(found) == ["created", "in_progress", "failed"]
    assert found[-1]["response"]["error"]["code"] == "context_length_exceeded"


TEXTS = st.text(max_size=12)
ARGUMENTS = TEXTS | st.dictionaries(st.sampled_from(["command", "input"]), TEXTS).map(json.dumps)
CALLS = st.tuples(st.sampled_from(["bash", "agents__spawn", "made_up"]), ARGUMENTS)
MESSAGES = st.builds(
    lambda text, thought, calls: Message(
        "assistant",
        text,
        reasoning=thought or None,
        tool_calls=tuple(ToolCall(f"call_{at}", name, said) for at, (name, said) in enumerate(calls)),
    ),
    TEXTS,
    TEXTS,
    st.lists(CALLS, max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(MESSAGES, st.integers(1, 5))
def test_a_reply_sent_back_is_the_message_that_was_sampled(message, size) -> None:
    reply = answer(message)
    whole = encoded(reply, tools=TOOLS)["output"]
    pieces = streamed(reply, deltas(message, size), tools=TOOLS)
    assert pieces[-1]["response"]["output"] == whole
    assert [event["item"] for event in pieces if event["type"] == "response.output_item.done"] == whole
    back = parse(user("go"), *whole, tools=TOOLS).chat.messages[1:]
    assert len(back) == 1
    assert message_key(back[0]) == message_key(message)
    assert [call.id for call in back[0].tool_calls] == [call.id for call in message.tool_calls]
    assert reasoning_agrees(message.reasoning, back[0].reasoning)
    assert back[0].reasoning == message.reasoning


def as_kept(item: dict[str, Any], draw: st.DataObject) -> dict[str, Any]:
    """An item as one harness or another sends it back."""
    gone = draw.draw(st.sets(st.sampled_from(["status", "summary"])))
    if item["type"] == "reasoning":
        gone |= draw.draw(st.sampled_from([set(), {"content"}, {"encrypted_content"}]))
    return {name: value for name, value in item.items() if name not in gone}


@settings(max_examples=100, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.booleans(), st.data())
def test_replies_stay_apart_and_whole_whatever_stands_between_their_items(replies, one_by_one, data) -> None:
    """Replies may follow one another (a stream broke, and its items were kept), and each result its own call."""
    items = [user("go")]
    for at, message in enumerate(replies):
        calls = [ToolCall(f"{at}_{call.id}", call.name, call.arguments) for call in message.tool_calls]
        reply = Answer(f"{at:02x}", 1.5, "m", replace(message, tool_calls=tuple(calls)), "stop", None, USAGE)
        told = [as_kept(item, data) for item in encoded(reply, tools=TOOLS)["output"]]
        results = {item["call_id"]: f"{item['type']}_output" for item in told if "call_id" in item}
        outputs = {name: {"type": kind, "call_id": name, "output": "ok"} for name, kind in results.items()}
        if one_by_one:
            pairs = [[item, *([outputs[item["call_id"]]] if "call_id" in item else [])] for item in told]
            items += [item for pair in pairs for item in pair]
        else:
            items += [*told, *outputs.values()]
    found = [message for message in parse(*items, tools=TOOLS).chat.messages if message.role == "assistant"]
    assert [message_key(message) for message in found] == [message_key(message) for message in replies]
    assert [message.reasoning for message in found] == [message.reasoning for message in replies]
