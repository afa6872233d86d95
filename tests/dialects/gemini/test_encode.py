"""Replies, whole and streamed, in the shapes that the vendor's clients rely on."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polar.capture.match import message_key, reasoning_agrees
from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, Usage
from polar.dialects.base import CallError
from polar.dialects.gemini import Gemini
from tests.dialects.gemini.conftest import STREAM, answer, encoded, events, model, parse, parts_of, streamed

WHOLE = Message(
    "assistant",
    "I will look.",
    reasoning="hm",
    tool_calls=(ToolCall("c1", "bash", '{"command": "ls",\n "timeout": 2.0}'), ToolCall("c2", "bash", "")),
)
DELTAS: list[Delta] = [
    ReasoningDelta("h"),
    ReasoningDelta("m"),
    TextDelta("I will "),
    TextDelta("look."),
    ToolCallDelta(0, id="c1", name="bash"),
    ToolCallDelta(0, WHOLE.tool_calls[0].arguments),
    ToolCallDelta(1, id="c2", name="bash"),
]


def bare(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in part.items() if key != "thoughtSignature"} for part in parts]


# ---- whole replies ---------------------------------------------------------------------------------------


def test_a_reply_has_its_thought_its_text_and_its_calls() -> None:
    body = encoded(answer(WHOLE, "tool_calls"))
    assert bare(parts_of(body)) == [
        {"text": "hm", "thought": True},
        {"text": "I will look."},
        {"functionCall": {"id": "c1", "name": "bash", "args": {"command": "ls", "timeout": 2.0}}},
        {"functionCall": {"id": "c2", "name": "bash", "args": {}}},
    ]
    assert body["candidates"][0]["finishReason"] == "STOP"
    assert body["candidates"][0]["content"]["role"] == "model"
    assert (body["responseId"], body["modelVersion"]) == ("abc", "any-model")
    assert body["usageMetadata"] == {
        "promptTokenCount": 10,
        "candidatesTokenCount": 5,
        "totalTokenCount": 15,
        "cachedContentTokenCount": 4,
    }


def test_a_thought_is_shown_only_to_those_who_ask_for_it() -> None:
    assert not any("thought" in part for part in parts_of(encoded(answer(WHOLE), shown=False)))
    data = streamed(answer(WHOLE), DELTAS, shown=False)
    assert b'"thought":true' not in data


def test_the_limit_is_max_tokens_and_nothing_cached_is_not_counted() -> None:
    body = encoded(answer(Message("assistant", "I"), "length", usage=Usage(1, 1)))
    assert body["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert "cachedContentTokenCount" not in body["usageMetadata"]


def test_an_empty_reply_still_has_a_part() -> None:
    assert parts_of(encoded(answer(Message("assistant")))) == [{"text": ""}]


@pytest.mark.parametrize("arguments", ['{"value": ', '{"a": "b"c"}', "null", "[1]", "NaN", '{"a": "\\ud800"}'])
def test_arguments_that_are_no_object_are_wrapped_and_come_back_as_sampled(arguments: str) -> None:
    message = Message("assistant", tool_calls=(ToolCall("c", "bash", arguments),))
    [part] = parts_of(encoded(answer(message)))
    assert part["functionCall"]["args"] == {"__unparsedToolInput": {"raw": arguments}}
    assert parse(model(part)).chat.messages == (message,)


def test_numbers_keep_their_digits() -> None:
    message = Message("assistant", tool_calls=(ToolCall("c", "f", '{"n": 123456789012345678901, "x": 1.10}'),))
    body = Gemini().encode(parse(), answer(message)).body
    assert b'"args":{"n":123456789012345678901,"x":1.10}' in body


# ---- streams ---------------------------------------------------------------------------------------------


def test_a_stream_is_the_reply_in_chunks_and_calls_come_whole_in_the_last() -> None:
    chunks = events(streamed(answer(WHOLE, "tool_calls"), DELTAS))
    assert bare(parts_of(*chunks[:-1])) == [
        {"text": "h", "thought": True},
        {"text": "m", "thought": True},
        {"text": "I will "},
        {"text": "look."},
    ]
    assert bare(parts_of(chunks[-1])) == bare(parts_of(encoded(answer(WHOLE))))[2:]
    assert ["finishReason" in chunk["candidates"][0] for chunk in chunks] == [False] * 4 + [True]
    assert ["usageMetadata" in chunk for chunk in chunks] == [False] * 4 + [True]
    assert {chunk["responseId"] for chunk in chunks} == {"abc"}


def test_without_sse_the_same_chunks_are_one_array() -> None:
    data = streamed(answer(WHOLE), DELTAS, sse=False)
    assert json.loads(data) == events(streamed(answer(WHOLE), DELTAS))
    encoder = Gemini().stream(parse(path={**STREAM, "alt": "json"}))
    assert encoder.content_type == "application/json"
    assert json.loads(encoder.keepalive + data) == json.loads(data)


def test_every_chunk_has_a_part_and_no_part_is_bare() -> None:
    """The vendor's Python SDK forgets a turn if one of its chunks has no part."""
    for deltas in ([], [TextDelta("a")], [ReasoningDelta("a")]):
        for chunk in events(streamed(answer(Message("assistant", "a")), deltas)):
            assert parts_of(chunk)
            assert all(parts_of(chunk))


def test_while_nothing_happens_an_event_stream_gets_a_chunk_with_an_empty_text() -> None:
    encoder = Gemini().stream(parse(path=STREAM))
    [life] = events(encoder.keepalive)
    assert parts_of(life) == [{"text": ""}]
    assert encoder.content_type.startswith("text/event-stream")
    assert encoder.start("abc", 1.5, "m", 10) == b""


def test_no_text_ends_a_line() -> None:
    text = "a\u2028b\u2029c\x85d\ne\rf"
    call = ToolCall("c", "f", '{"t":\r\n "\u2028"}')
    data = streamed(answer(Message("assistant", text, tool_calls=(call,))), [TextDelta(text)])
    first, last = events(data)
    assert parts_of(first)[0]["text"] == text
    assert parts_of(last)[0]["functionCall"]["args"] == {"t": "\u2028"}


# ---- there and back --------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARGUMENTS = st.one_of(
    TEXTS.filter(lambda text: text.strip() or not text),
    st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans(), max_size=3).map(json.dumps),
    st.sampled_from(['{"__unparsedToolInput": {"raw": "x"}}', '{"a": 1, "a": 2}', "{} {}", '{"a": 1e999}']),
)
CALLS = st.lists(st.tuples(TEXTS.filter(bool), ARGUMENTS), max_size=3)


def drop_thoughts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Gemini CLI keeps of a reply: thoughts go, texts in a row become one, calls get the client's ids."""
    kept: list[dict[str, Any]] = []
    for part in parts:
        if part.get("thought"):
            continue
        if kept and kept[-1].get("text") and "text" in part:
            kept[-1] = {**kept[-1], "text": kept[-1]["text"] + part["text"]}
        elif "functionCall" in part:
            call = {**part["functionCall"], "id": f"theirs_{len(kept)}"}
            kept.append({**part, "functionCall": call})
        else:
            kept.append(part)
    return kept


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, reasoning=st.none() | TEXTS.filter(bool), calls=CALLS, data=st.data())
@example(text="", reasoning=None, calls=[("f", '{"__unparsedToolInput": {"raw": "x"}}')], data=None)
def test_what_a_client_sends_back_is_the_reply(text: str, reasoning: str | None, calls: Any, data: Any) -> None:
    tool_calls = tuple(ToolCall(f"c{n}", name, arguments) for n, (name, arguments) in enumerate(calls))
    message = Message("assistant", text, reasoning=reasoning, tool_calls=tool_calls)
    cut = data.draw(st.integers(0, len(text))) if data is not None else 0
    deltas: list[Delta] = [ReasoningDelta(reasoning)] if reasoning else []
    deltas += [TextDelta(text[:cut]), TextDelta(text[cut:])]
    for parts in (
        parts_of(encoded(answer(message))),
        parts_of(*events(streamed(answer(message), deltas))),
        parts_of(*json.loads(streamed(answer(message), deltas, shown=False, sse=False))),
        drop_thoughts(parts_of(*events(streamed(answer(message), deltas)))),
    ):
        [back] = parse(model(*parts)).chat.messages
        assert message_key(back) == message_key(message)
        assert back.reasoning == reasoning
        assert [call.id for call in back.tool_calls] == [call.id for call in tool_calls]


def test_thinking_that_goes_on_after_text_is_signed_again() -> None:
    message = Message("assistant", "ab", reasoning="xy")
    deltas: list[Delta] = [ReasoningDelta("x"), TextDelta("a"), ReasoningDelta("y"), TextDelta("b")]
    [back] = parse(model(*parts_of(*events(streamed(answer(message), deltas, shown=False))))).chat.messages
    assert reasoning_agrees("xy", back.reasoning)
    assert back.content == "ab"


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "status", "name"),
    [
        ("bad_request", 400, "INVALID_ARGUMENT"),
        ("unauthorized", 401, "UNAUTHENTICATED"),
        ("not_found", 404, "NOT_FOUND"),
        ("conflict", 400, "INVALID_ARGUMENT"),
        ("gone", 410, "FAILED_PRECONDITION"),
        ("too_large", 413, "INVALID_ARGUMENT"),
        ("overloaded", 503, "UNAVAILABLE"),
        ("unavailable", 502, "UNAVAILABLE"),
        ("internal", 500, "INTERNAL"),
    ],
)
def test_an_error_has_the_vendors_shape(kind: Any, status: int, name: str) -> None:
    response = Gemini().error(CallError(kind, "no", retry_after=1.0))
    assert response.status == status
    message = "Server error: no" if kind == "unavailable" else "no"
    assert json.loads(response.body) == {"error": {"code": status, "message": message, "status": name}}
    assert response.headers == {"retry-after": "1.0"}


def test_a_prompt_over_the_context_is_told_in_the_vendors_words() -> None:
    error = CallError("context_length", "too long", prompt_tokens=70, max_tokens=64)
    body = json.loads(Gemini().error(error).body)["error"]
    assert body["message"] == "The input token count (70) exceeds the maximum number of tokens allowed (64)."
    assert (body["code"], body["status"]) == (400, "INVALID_ARGUMENT")
    unknown = json.loads(Gemini().error(CallError("context_length", "too long")).body)["error"]["message"]
    assert unknown == "The input token count exceeds the maximum number of tokens allowed: too long"


def test_an_error_in_a_stream_has_the_streams_form() -> None:
    error = CallError("unavailable", "the engine\nfailed")
    body = json.loads(Gemini().error(error).body)
    sse = Gemini().stream(parse(path=STREAM))
    sse.start("abc", 1.5, "m", 10)
    assert sse.delta(TextDelta("a"))
    assert re.fullmatch(rb"\{.*\}\n\n", sse.error(error))
    assert json.loads(sse.error(error)) == body
    for deltas in ([], [TextDelta("a")]):
        array = Gemini().stream(parse(path={**STREAM, "alt": ""}))
        array.start("abc", 1.5, "m", 10)
        sent = b"".join(array.delta(delta) for delta in deltas)
        assert json.loads(sent + array.error(error))[-1] == body


# ---- side routes -----------------------------------------------------------------------------------------


def test_models_have_the_vendors_names() -> None:
    [one] = json.loads(Gemini().models(["vendor/some-model"]).body)["models"]
    assert one["name"] == "models/vendor/some-model"
    assert one == json.loads(Gemini().model("vendor/some-model").body)
    assert json.loads(Gemini().count(7).body) == {"totalTokens": 7}


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_a_models_name_may_have_slashes_and_colons(version: str) -> None:
    generate = Gemini().routes[0]
    match = re.fullmatch(generate.pattern, f"/{version}/models/vendor/m:7b:streamGenerateContent")
    assert match is not None
    assert match.groupdict() == {"model": "vendor/m:7b", "verb": "streamGenerateContent"}
