"""Chat replies and streams: that they can be sent back, and the logprobs that are asked for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from polar.capture.match import message_key
from polar.contract.chat import Delta, Message, ReasoningDelta, TextDelta, ToolCall, ToolCallDelta, Usage
from polar.dialects.base import Answer, Call, Tokens
from polar.dialects.openai_chat import OpenAIChat

HALF = "\ufffd"


def parse(*messages: Any, **fields: Any) -> Call:
    body = {"model": "m", "messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}
    return OpenAIChat().parse(json.dumps(body).encode(), {}, {})


def answer(message: Message, tokens: Tokens | None = None) -> Answer:
    finish: Any = "tool_calls" if message.tool_calls else "stop"
    return Answer("abc", 1.5, "any-model", message, finish, None, Usage(10, 5, 4), tokens)


def whole(reply: Answer, **fields: Any) -> dict[str, Any]:
    return json.loads(OpenAIChat().encode(parse(**fields), reply).body)


def chunks(reply: Answer, pieces: list[Delta], **fields: Any) -> list[dict[str, Any]]:
    encoder = OpenAIChat().stream(parse(stream=True, **fields))
    data = encoder.start("abc", 1.5, "any-model", 10) + b"".join(encoder.delta(piece) for piece in pieces)
    blocks = (data + encoder.finish(reply)).decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def pieces_of(message: Message, size: int) -> list[Delta]:
    def cut(text: str) -> list[str]:
        return [text[at : at + size] for at in range(0, len(text), size)]

    out: list[Delta] = [ReasoningDelta(text) for text in cut(message.reasoning or "")]
    out += [TextDelta(text) for text in cut(str(message.content))]
    for index, call in enumerate(message.tool_calls):
        out.append(ToolCallDelta(index, "", call.id, call.name))
        out += [ToolCallDelta(index, text) for text in cut(call.arguments)]
    return out


TEXTS = st.text(max_size=12)
ARGUMENTS = TEXTS | st.dictionaries(TEXTS, TEXTS, max_size=2).map(json.dumps)
MESSAGES = st.builds(
    lambda text, thought, calls: Message(
        "assistant",
        text,
        reasoning=thought or None,
        tool_calls=tuple(ToolCall(f"call_{at}", name, said) for at, (name, said) in enumerate(calls)),
    ),
    TEXTS,
    TEXTS,
    st.lists(st.tuples(st.sampled_from(["bash", "look"]), ARGUMENTS), max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(MESSAGES, st.integers(1, 5))
def test_a_reply_sent_back_is_the_message_that_was_sampled(message: Message, size: int) -> None:
    """Whole, and as the vendor's own client puts a stream together."""
    reply = answer(message)
    told = whole(reply)
    state: Any = ChatCompletionStreamState()
    for chunk in chunks(reply, pieces_of(message, size)):
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    joined = state.get_final_completion().choices[0]
    assert joined.finish_reason == told["choices"][0]["finish_reason"] == reply.finish_reason
    for sent in (told["choices"][0]["message"], joined.message.model_dump()):
        [back] = parse(sent).chat.messages
        assert message_key(back) == message_key(message)
        assert back.tool_calls == message.tool_calls
        assert (back.reasoning or None) == message.reasoning


def tokens(*logprobs: float, text: bool = True) -> Tokens:
    names = {7: "Par", 8: "is", 9: HALF}
    at = np.array([7, 8, 9], dtype=np.int32)
    numbers = np.array(logprobs, dtype=np.float32)
    return Tokens(at, numbers, lambda: at, names.__getitem__ if text else None)


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_there_if_they_are_asked_for(stream: bool, top: int | None) -> None:
    """A6: what we ask of the engine is ours; the client sees what it asked for."""
    reply = answer(Message("assistant", "Paris"), tokens(-0.5, -1.0, -2.0))
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": top}
    if stream:
        events = chunks(reply, [TextDelta("Paris")], **fields)
        assert [event["choices"][0]["logprobs"] for event in events[:-1]] == [None] * (len(events) - 1)
        found = ChatCompletionChunk.model_validate(events[-1]).choices[0].logprobs
    else:
        found = ChatCompletion.model_validate(whole(reply, **fields)).choices[0].logprobs
    assert found is not None
    said = [(one.token, one.logprob, one.bytes) for one in found.content or ()]
    assert said == [("Par", -0.5, [80, 97, 114]), ("is", -1.0, [105, 115]), (HALF, -2.0, None)]
    assert [len(one.top_logprobs) for one in found.content or ()] == [1 if top else 0] * 3


def test_logprobs_without_a_tokenizer_name_the_ids_and_without_a_full_record_there_are_none() -> None:
    reply = answer(Message("assistant", "Paris"), tokens(-0.5, -1.0, -2.0, text=False))
    found = whole(reply, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in found] == [(f"token_id:{token}", None) for token in (7, 8, 9)]
    for unknown in (tokens(-0.5), tokens(-0.5, -1.0, float("nan")), None):
        silent = answer(Message("assistant", "Paris"), unknown)
        assert whole(silent, logprobs=True)["choices"][0]["logprobs"] is None
    assert whole(reply)["choices"][0]["logprobs"] is None
