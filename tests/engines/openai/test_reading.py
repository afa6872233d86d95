"""What comes out of a reply: every id, logprob and piece of text that the engine sent, in its order."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.contract.chat import Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, Usage
from polar.contract.completion import WeightSpan
from polar.engines.base import ChatChunk, EngineError
from polar.engines.openai_reply import ReplyReader
from polar.engines.openai_sse import EventReader
from tests.engines.openai.conftest import Start, call, ids, logprobs, prompt
from tests.engines.openai.wire import Reply, sse, whole, wire_server

PROMPT = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 9690]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}}


def piece(
    delta: dict[str, Any],
    tokens: list[int] | None = None,
    logprob: Any = -0.5,
    finish: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    entries = [{"token": "x", "logprob": logprob, "bytes": [120], "top_logprobs": []} for _ in tokens or ()]
    choice = {"index": 0, "delta": delta, "logprobs": {"content": entries}, "finish_reason": finish, **more}
    return {"choices": [choice | ({} if tokens is None else {"token_ids": tokens})]}


def read(*events: dict[str, Any], require_token_ids: bool = True) -> list[ChatChunk]:
    reader = ReplyReader("http://engine/v1/chat/completions", require_token_ids=require_token_ids)
    chunks = []
    for event in events:
        reader.feed(json.dumps(event).encode())
        chunks.append(reader.take())
    return [chunk for chunk in [*chunks, reader.finish()] if chunk is not None]


def replay(name: str) -> list[ChatChunk]:
    """A stream recorded from a real engine."""
    data = (Path(__file__).parent / "recorded" / name).read_bytes()
    return read(*[json.loads(event) for event in EventReader().feed(data) if event != b"[DONE]"])


def test_a_streamed_reply_is_its_deltas_its_ids_and_at_the_end_the_whole_message() -> None:
    chunks = read(
        PROMPT,
        piece({"content": "The"}, [504], -1.25),
        piece({"content": " end"}, [3575], -0.5),
        piece({}, [2], -0.25, finish="stop", stop_reason=None),
        USAGE,
    )
    assert prompt(chunks) == [1, 9690]
    assert ids(chunks) == [504, 3575, 2]
    assert logprobs(chunks) == [-1.25, -0.5, -0.25]
    assert [d for c in chunks for d in c.deltas] == [TextDelta("The"), TextDelta(" end")]
    last = chunks[-1]
    assert (last.message, last.finish_reason, last.usage) == (Message("assistant", "The end"), "stop", Usage(2, 3))


def test_chunks_without_text_keep_their_ids_and_a_chunk_may_carry_several_or_none() -> None:
    chunks = read(PROMPT, piece({}, [44, 19324, 79]), piece({"content": "lag"}, []), piece({}, [2], finish="stop"))
    assert ids(chunks) == [44, 19324, 79, 2]
    assert len(logprobs(chunks)) == 4


def test_a_tool_call_as_vllm_streamed_it() -> None:
    chunks = replay("vllm_0.32_tool_call.sse")
    last = chunks[-1]
    assert (len(prompt(chunks)), len(ids(chunks)), len(logprobs(chunks))) == (197, 30, 30)
    assert ids(chunks)[:6] == [44, 19324, 79, 4350, 46, 198]
    assert last.message is not None
    (made,) = last.message.tool_calls
    assert (made.name, made.arguments) == ("get_weather", '{\n  "city": {\n    "type": "string",')
    assert last.finish_reason == "length"


def test_a_reply_as_sglang_streamed_it() -> None:
    chunks = replay("sglang_0.5.23_chat.sse")
    assert (len(prompt(chunks)), ids(chunks), len(logprobs(chunks))) == (37, [504, 3575, 282], 3)
    assert chunks[-1].message == Message("assistant", "The capital of")
    assert (chunks[-1].finish_reason, chunks[-1].usage) == ("length", Usage(37, 3))


def test_ids_are_read_from_logprob_tokens_where_the_field_is_missing() -> None:
    named = [{"token": "token_id:40", "logprob": -0.1}, {"token": "token_id:3278", "logprob": -0.2}]
    event = {"choices": [{"index": 0, "delta": {"content": "I am"}, "logprobs": {"content": named}}]}
    chunks = read(PROMPT, event, piece({}, finish="stop"))
    assert ids(chunks) == [40, 3278]
    assert logprobs(chunks) == [-0.1, -0.2]


def test_text_that_looks_like_an_id_is_not_taken_for_one() -> None:
    entry = {"token": "say token_id:40", "logprob": -0.1}
    event = {"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [entry]}}]}
    with pytest.raises(EngineError, match="token_ids") as caught:
        read(PROMPT, event, piece({}, finish="stop"))
    assert caught.value.kind == "no_token_ids"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, True, "-0.5"])
async def test_a_logprob_that_is_no_number_is_nan_and_the_reply_is_served(value: Any, start: Start) -> None:
    reply = sse(PROMPT, piece({"content": "a, NaN, b"}, [5], value), piece({}, [2], -0.5, finish="stop"))
    async with wire_server(Reply([reply])) as wire:
        chunks = await call(await start(wire.url))
    first, second = logprobs(chunks)
    assert math.isnan(first)
    assert second == -0.5
    assert chunks[-1].message == Message("assistant", "a, NaN, b")


def test_a_sentinel_logprob_is_passed_on_as_it_came() -> None:
    assert logprobs(read(PROMPT, piece({"content": "a"}, [5], -9999.0, finish="stop"))) == [-9999.0]


def test_no_logprobs_at_all_are_not_made_up() -> None:
    chunks = read(PROMPT, piece({"content": "a"}, [5, 2], finish="stop") | {"usage": None})
    bare = read(
        PROMPT, {"choices": [{"index": 0, "delta": {}, "logprobs": None, "token_ids": [5], "finish_reason": "stop"}]}
    )
    assert len(logprobs(chunks)) == 2
    assert (ids(bare), logprobs(bare)) == ([5], [])


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 2}, {"completion_tokens": 1}])
def test_usage_that_the_engine_does_not_send_is_not_made_up(usage: Any) -> None:
    event = piece({"content": "a"}, [5], finish="stop") | {"usage": usage}
    assert read(PROMPT, event)[-1].usage is None


def test_usage_that_contradicts_the_ids_is_passed_on_for_the_capture_to_judge() -> None:
    assert read(PROMPT, piece({"content": "a"}, [5], finish="stop"), USAGE)[-1].usage == Usage(2, 3)


def test_cached_tokens_are_read() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    last = read(PROMPT, piece({"content": "a"}, [5], finish="stop"), {"choices": [], "usage": usage})[-1]
    assert last.usage == Usage(2, 1, 1)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_comes_under_either_name(field: str) -> None:
    chunks = read(PROMPT, piece({field: "hmm"}, [5]), piece({"content": "yes"}, [6], finish="stop"))
    assert chunks[-1].message == Message("assistant", "yes", reasoning="hmm")
    assert [d for c in chunks for d in c.deltas] == [ReasoningDelta("hmm"), TextDelta("yes")]


def call_piece(index: int | None, call_id: str | None, name: str | None, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return piece({"tool_calls": [{"index": index, "id": call_id, "function": function}]}, [7])


def test_parallel_tool_calls_keep_their_order_and_arguments() -> None:
    chunks = read(
        PROMPT,
        call_piece(0, "a", "f", None),
        call_piece(0, None, None, '{"x":'),
        call_piece(0, None, None, " 1}"),
        call_piece(1, "b", "g", "{}"),
        piece({}, [2], finish="stop"),
    )
    last = chunks[-1]
    assert last.message is not None
    assert last.message.tool_calls == (ToolCall("a", "f", '{"x": 1}'), ToolCall("b", "g", "{}"))
    assert last.finish_reason == "tool_calls"
    assert [d for c in chunks for d in c.deltas] == [
        ToolCallDelta(0, "", id="a", name="f"),
        ToolCallDelta(0, '{"x":'),
        ToolCallDelta(0, " 1}"),
        ToolCallDelta(1, "{}", id="b", name="g"),
    ]


def test_two_calls_under_one_index_are_two_calls() -> None:
    last = read(PROMPT, call_piece(0, "a", "f", "{}"), call_piece(0, "b", "f", "[]"), piece({}, [2], finish="stop"))[
        -1
    ]
    assert last.message is not None
    assert last.message.tool_calls == (ToolCall("a", "f", "{}"), ToolCall("b", "f", "[]"))


def test_a_name_that_comes_late_and_an_id_that_never_does() -> None:
    chunks = read(
        PROMPT, call_piece(0, None, None, "{"), call_piece(0, None, "f", "}"), piece({}, [2], finish="stop")
    )
    (begin,) = [d for c in chunks for d in c.deltas]
    assert isinstance(begin, ToolCallDelta)
    assert (begin.name, begin.arguments) == ("f", "{}")
    assert begin.id


def test_arguments_sent_as_an_object_become_text() -> None:
    last = read(PROMPT, call_piece(None, "a", "f", {"x": 1}), piece({}, [2], finish="tool_calls"))[-1]
    assert last.message is not None
    assert json.loads(last.message.tool_calls[0].arguments) == {"x": 1}


@pytest.mark.parametrize(
    ("told", "meant"),
    [("stop", "stop"), ("length", "length"), ("tool_calls", "tool_calls"), ("abort", "abort"), ("error", "abort")],
)
def test_finish_reasons(told: str, meant: str) -> None:
    assert read(PROMPT, piece({"content": "a"}, [5], finish=told))[-1].finish_reason == meant


@pytest.mark.parametrize("field", ["stop_reason", "matched_stop"])
def test_a_stop_string_is_named_and_a_stop_id_is_not(field: str) -> None:
    by_string = piece({"content": "a"}, [5], finish="stop", **{field: "France"})
    by_id = piece({"content": "a"}, [5], finish="stop", **{field: 2})
    assert read(PROMPT, by_string)[-1].stop_sequence == "France"
    assert read(PROMPT, by_id)[-1].stop_sequence is None


def test_sglang_sends_all_ids_in_an_extension_chunk_at_the_end() -> None:
    ext: dict[str, Any] = {
        "choices": [],
        "usage": None,
        "sglext": {"input_ids": [1, 4093], "output_ids": [[504, 3575]]},
    }
    chunks = read(
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "", "reasoning_content": None}}]},
        piece({"content": "The"}),
        {"choices": [{"index": 0, "delta": {"content": None}, "finish_reason": "length", "matched_stop": None}]},
        ext,
        USAGE,
    )
    assert prompt(chunks) == [1, 4093]
    assert ids(chunks) == [504, 3575]
    assert chunks[-1].finish_reason == "length"


def test_sglang_whole_reply_with_ids_and_weight_versions() -> None:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "The", "reasoning_content": None, "tool_calls": None},
        "logprobs": {"content": [{"token": "The", "logprob": -0.5}]},
        "finish_reason": "length",
        "prompt_token_ids": [1, 4093],
        "response_token_ids": [504],
    }
    spans = [{"version": "step-1", "start": 0, "end": 1}]
    (last,) = read({"choices": [choice], "metadata": {"weight_version": "step-1", "weight_versions": spans}})[-1:]
    chunks = read({"choices": [choice], "metadata": {"weight_version": "step-1", "weight_versions": spans}})
    assert (prompt(chunks), ids(chunks)) == ([1, 4093], [504])
    assert list(last.weight_spans) == [WeightSpan("step-1", 0, 1)]


def test_one_weight_version_for_the_whole_reply_spans_it() -> None:
    event = piece({"content": "a"}, [5, 6], finish="stop") | {"metadata": {"weight_version": "7"}}
    assert list(read(PROMPT, event)[-1].weight_spans) == [WeightSpan("7", 0, 2)]


@pytest.mark.parametrize(("told", "meant"), [(7, "7"), (0, "0")])
def test_a_weight_version_may_be_a_number(told: int, meant: str) -> None:
    event = piece({"content": "a"}, [5], finish="stop") | {"metadata": {"weight_version": told}}
    assert list(read(PROMPT, event)[-1].weight_spans) == [WeightSpan(meant, 0, 1)]


def test_ids_in_no_known_form_put_the_reply_in_doubt_and_its_text_is_passed_on() -> None:
    odd = piece({"content": " b"}, [6])
    odd["choices"][0]["token_ids"] = [None]
    chunks = read(PROMPT, piece({"content": "a"}, [5]), odd, piece({"content": " c"}, [2], finish="stop"), USAGE)
    assert chunks[-1].message == Message("assistant", "a b c")
    assert "Expected `int`, got `null`" in str(chunks[-1].doubt)


def test_no_weight_version_is_none() -> None:
    assert list(read(PROMPT, piece({"content": "a"}, [5], finish="stop"))[-1].weight_spans) == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_without_ids_fails_and_names_the_field_and_the_url(stream: bool, start: Start) -> None:
    message = {"index": 0, "finish_reason": "stop", "logprobs": None}
    reply = (
        Reply([sse({"choices": [message | {"delta": {"content": "hi"}}]})])
        if stream
        else whole({"choices": [message | {"message": {"content": "hi"}}]})
    )
    async with wire_server(reply) as wire:
        with pytest.raises(EngineError) as caught:
            await call(await start(wire.url), stream=stream)
        assert caught.value.kind == "no_token_ids"
        assert "`choices[0].token_ids`" in str(caught.value)
        assert wire.url in str(caught.value)


def test_sampled_ids_without_the_prompt_ids_fail_too() -> None:
    with pytest.raises(EngineError, match="`prompt_token_ids`") as caught:
        read(piece({"content": "a"}, [5], finish="stop"))
    assert caught.value.kind == "no_token_ids"


def test_without_the_requirement_a_reply_without_ids_is_served() -> None:
    last = read(
        {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}, require_token_ids=False
    )
    assert last[-1].message == Message("assistant", "hi")
    assert ids(last) == []


def test_a_reply_in_which_nothing_was_sampled_lacks_no_ids() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 0}}
    last = read(PROMPT, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, usage)[-1]
    assert (last.message, last.usage) == (Message("assistant"), Usage(2, 0))


def test_a_reply_without_a_finish_reason_is_cut() -> None:
    with pytest.raises(EngineError, match="without a finish reason") as caught:
        read(PROMPT, piece({"content": "a"}, [5]))
    assert caught.value.kind == "unavailable"


def test_what_is_no_chat_completion_is_named_by_its_path() -> None:
    with pytest.raises(EngineError, match=r"\.delta\.content") as caught:
        read({"choices": [{"index": 0, "delta": {"content": 5}}]})
    assert caught.value.kind == "unavailable"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[]", []), ("[5]", [5]), ("[1,2,151645]", [1, 2, 151645]), ("[ 1 , 2 ]", [1, 2]), ("[1,\n2]", [1, 2])],
)
def test_prompt_ids_are_int32_however_the_list_is_written(text: str, expected: list[int]) -> None:
    reader = ReplyReader("u", require_token_ids=True)
    reader.feed(b'{"prompt_token_ids":' + text.encode() + b"}")
    chunk = reader.take()
    assert chunk is not None
    assert chunk.prompt_ids is not None
    assert chunk.prompt_ids.dtype == np.int32
    assert chunk.prompt_ids.tolist() == expected


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_any_prompt_ids_survive(values: list[int]) -> None:
    reader = ReplyReader("u", require_token_ids=True)
    reader.feed(json.dumps({"prompt_token_ids": values}).encode())
    chunk = reader.take()
    assert chunk is not None
    assert chunk.prompt_ids is not None
    assert chunk.prompt_ids.tolist() == values


def read_prompt(payload: bytes, expected: list[int]) -> list[int]:
    reader = ReplyReader("u", require_token_ids=True, expected=np.array(expected, dtype=np.int32))
    reader.feed(payload)
    chunk = reader.take()
    assert chunk is not None
    assert chunk.prompt_ids is not None
    assert chunk.prompt_ids.dtype == np.int32
    return chunk.prompt_ids.tolist()


@given(st.lists(st.integers(0, 300), max_size=8), st.lists(st.integers(0, 300), max_size=8), st.booleans())
def test_what_prompt_was_expected_changes_nothing(values: list[int], other: list[int], follows: bool) -> None:
    payload = json.dumps({"prompt_token_ids": values}, separators=(",", ":")).encode()
    expected = values[: len(other)] if follows else other
    assert read_prompt(payload, expected) == values


@pytest.mark.parametrize("expected", [[1], [1, 2], [1, 23], [1, 23, 4], [1, 2, 3]])
def test_a_prompt_is_no_continuation_because_its_digits_are(expected: list[int]) -> None:
    assert read_prompt(b'{"prompt_token_ids":[1,23,4]}', expected) == [1, 23, 4]


def test_a_field_of_that_name_in_a_tool_call_is_not_the_prompt() -> None:
    call = b'{"index":0,"function":{"name":"f","arguments":{"prompt_token_ids":[1,2,3]}}}'
    payload = b'{"choices":[{"message":{"tool_calls":[%s]}}],"prompt_token_ids":[7,8]}' % call
    assert read_prompt(payload, [1, 2]) == [7, 8]


@pytest.mark.parametrize(
    "ids_text", [b'[1,2,"3"]', b"[1,2,[3]]", b"[1,2,null]", b"[1,2,99999999999]", b"[99999999999]"]
)
def test_a_list_of_what_is_no_id_is_not_read_as_the_prompt(ids_text: bytes) -> None:
    reader = ReplyReader("u", require_token_ids=True, expected=np.array([1, 2], dtype=np.int32))
    choice = b'{"index":0,"message":{"content":"a"},"token_ids":[5],"finish_reason":"stop"}'
    reader.feed(b'{"choices":[' + choice + b'],"prompt_token_ids":' + ids_text + b"}")
    last = reader.finish()
    assert last.prompt_ids is None
    assert "prompt ids in no known form" in str(last.doubt)


@pytest.mark.parametrize("ids_text", [b"[1,2,3,]", b"[1,2,3 4]", b"[1,2,,3]"])
def test_a_list_that_only_begins_as_expected_is_refused_as_ever(ids_text: bytes) -> None:
    reader = ReplyReader("u", require_token_ids=True, expected=np.array([1, 2], dtype=np.int32))
    with pytest.raises((EngineError, ValueError)):
        reader.feed(b'{"prompt_token_ids":' + ids_text + b"}")


@given(st.data())
def test_events_survive_any_cut_of_the_network(data: st.DataObject) -> None:
    payloads = data.draw(
        st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=6)
    )
    newline = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    comment = data.draw(st.sampled_from([b"", b": ping" + newline, b": ping" + newline * 2, b"event: x" + newline]))
    stream = b"".join(comment + b"data: " + p.encode() + newline * 2 for p in payloads)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, events = EventReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        events += reader.feed(stream[begin:end])
    assert [event.decode() for event in events + reader.end()] == payloads


def test_an_event_without_its_last_blank_line_still_counts() -> None:
    reader = EventReader()
    assert reader.feed(b"data:[DONE]") == []
    assert reader.end() == [b"[DONE]"]
