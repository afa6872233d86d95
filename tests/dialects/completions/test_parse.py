"""Plain completions: what a request means, and what is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.contract.chat import Chat, Message, Usage
from polar.dialects.base import Answer, Call, CallError
from polar.dialects.openai_completions import OpenAICompletions


def parse(**fields: Any) -> Call:
    return OpenAICompletions().parse(json.dumps({"model": "m", "prompt": "Once", **fields}).encode(), {}, {})


def chat(**fields: Any) -> Chat:
    return parse(**fields).chat


@pytest.mark.parametrize(
    ("sent", "meant"),
    [("Once", "Once"), (["Once"], "Once"), ([1, 2, 3], (1, 2, 3)), ([[1, 2, 3]], (1, 2, 3)), ("", ""), ([], ())],
)
def test_one_prompt_is_text_or_ids_in_any_of_the_forms(sent, meant) -> None:
    assert chat(prompt=sent).prompt == meant


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": ["a", "b"]}, "a call of its own"),
        ({"prompt": [[1], [2]]}, "a call of its own"),
        ({"prompt": [1, "a"]}, "token ids"),
        ({"prompt": [-1]}, "token ids"),
        ({"prompt": [2**31]}, "token ids"),
        ({"prompt": [True]}, "token ids"),
        ({"prompt": [1.5]}, "token ids"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 2}, "'n'"),
        ({"best_of": 3}, "best_of"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
def test_what_can_not_be_done_is_refused_in_words(fields, words) -> None:
    with pytest.raises(CallError) as caught:
        parse(**fields)
    assert caught.value.kind == "bad_request"
    assert words in caught.value.message


def test_the_limit_is_the_apis_own_where_none_is_given() -> None:
    assert chat().sampling.max_tokens == 16
    assert chat(max_tokens=None).sampling.max_tokens == 16
    assert chat(max_tokens=99).sampling.max_tokens == 99


def test_what_is_not_heeded_is_named_in_one_warning() -> None:
    assert parse(user="u", n=1, best_of=1, stream_options={"include_usage": True}, logprobs=1).warnings == ()
    assert [warning.split()[0] for warning in parse(logprobs=5).warnings] == ["logprobs"]
    assert [warning.split()[0] for warning in parse(min_tokens=3).warnings] == ["min_tokens"]


def test_settings_reach_the_sampler() -> None:
    sampling = chat(temperature=0.5, top_p=0.9, stop=["\n", ""], seed=3, logit_bias={"7": -1}).sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.seed) == (0.5, 0.9, ("\n",), 3)
    assert sampling.logit_bias == {7: -1}
    assert chat(stop="END").sampling.stop == ("END",)
    assert chat(add_special_tokens=False).template_args == {"add_special_tokens": False}


@given(st.binary() | st.builds(lambda fields: json.dumps(fields).encode(), st.dictionaries(st.text(), st.text())))
def test_any_bytes_are_a_call_or_a_refusal(body: bytes) -> None:
    sent: object
    try:
        sent = OpenAICompletions().parse(body, {}, {}).chat.prompt
    except CallError as error:
        sent = error.kind
    assert sent == "bad_request" or isinstance(sent, str | tuple)


def test_a_reply_without_a_record_of_its_tokens_has_no_logprobs() -> None:
    answer = Answer("abc", 1.5, "m", Message("assistant", "Hi"), "stop", None, Usage(1, 1))
    body = json.loads(OpenAICompletions().encode(parse(logprobs=0, return_token_ids=True), answer).body)
    assert body["choices"] == [
        {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert (body["id"], body["object"]) == ("cmpl-abc", "text_completion")
