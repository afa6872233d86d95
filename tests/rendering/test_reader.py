"""Reading a reply: ids to text, stop strings, the stop id, finish reasons."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.contract.chat import FinishReason, TextDelta
from polar.rendering.parsers import PlainParser, fold
from polar.rendering.reader import TemplateReader
from polar.rendering.tokenizer import TextStream, Tokenizer
from tests.rendering.talk import Talk, hermes_call, user

WORDS = st.text(alphabet="ab <|>\n🙂é東", max_size=30)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer.load(tiny)


def cut(values: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted(min(place, len(values)) for place in cuts)
    return [values[a:b] for a, b in zip([0, *places], [*places, len(values)], strict=True)]


def reader(tokenizer: Tokenizer, *stop: str) -> TemplateReader:
    return TemplateReader(tokenizer, PlainParser(), stop_ids=frozenset({2}), stop=stop)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 1100), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_law_text_of_any_ids_does_not_depend_on_the_cuts(
    tokenizer: Tokenizer, values: list[int], cuts: list[int]
) -> None:
    stream = TextStream(tokenizer)
    text = "".join(stream.feed(chunk) for chunk in cut(values, cuts)) + stream.finish()
    assert text == tokenizer.decode(values)


def test_no_half_character_is_given_out(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    out = [stream.feed([token]) for token in tokenizer.encode("a🙂b")]
    assert "".join(out) == "a🙂b"
    assert all("\ufffd" not in piece for piece in out)
    half = tokenizer.encode("🙂")[:-1]
    assert TextStream(tokenizer).feed(half) == ""


def test_bytes_that_never_become_a_character_are_kept_as_replacement(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer)
    one.feed(tokenizer.encode("ok 🙂")[:-1])
    content = one.finish("length").message.content
    assert str(content).startswith("ok ")
    assert "\ufffd" in content


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WORDS, st.lists(WORDS.filter(bool).map(lambda s: s[:4]), max_size=3), st.lists(st.integers(0, 40), max_size=6))
def test_law_stop_strings_cut_at_the_same_place_however_ids_come(
    tokenizer: Tokenizer, text: str, stop: list[str], cuts: list[int]
) -> None:
    one = reader(tokenizer, *stop)
    deltas = [delta for chunk in cut(tokenizer.encode(text), cuts) for delta in one.feed(chunk)]
    reply = one.finish("stop")
    ends = [(text.index(s) + len(s), text.index(s)) for s in stop if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert reply.message.content == expected
    assert fold([*deltas, *reply.deltas]) == reply.message
    assert (reply.stop_sequence is not None) == bool(ends) == one.stopped


def test_a_stop_string_is_reported_and_ends_the_reply(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer, "Observation:")
    one.feed(tokenizer.encode("Action\nObserv"))
    assert not one.stopped
    one.feed(tokenizer.encode("ation: more"))
    assert one.stopped
    assert one.feed(tokenizer.encode("and more")) == []
    reply = one.finish("abort")
    assert (reply.message.content, reply.finish_reason, reply.stop_sequence) == ("Action\n", "stop", "Observation:")


def test_a_beginning_of_a_stop_string_is_given_out_when_it_is_none(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer, "###")
    assert fold(one.feed(tokenizer.encode("a##"))).content == "a"
    assert fold(one.feed(tokenizer.encode("b"))).content == "##b"


def test_the_stop_id_is_not_text_and_another_special_token_is(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer)
    assert one.feed([*tokenizer.encode("Hi<|im_start|>"), 2]) == [TextDelta("Hi<|im_start|>")]
    assert one.finish("stop").message.content == "Hi<|im_start|>"


def test_a_stop_id_that_ended_nothing_is_text(tokenizer: Tokenizer) -> None:
    one = reader(tokenizer)
    one.feed([2])
    one.feed(tokenizer.encode("on"))
    assert one.finish("length").message.content == "<|im_end|>on"


@pytest.mark.parametrize(
    ("engine", "call", "told"),
    [
        ("stop", True, "tool_calls"),
        ("tool_calls", True, "tool_calls"),
        ("length", True, "length"),
        ("abort", True, "abort"),
        ("stop", False, "stop"),
        ("tool_calls", False, "stop"),
    ],
)
def test_finish_reasons(talk: Talk, engine: FinishReason, call: bool, told: FinishReason) -> None:
    talk.ask(user("Weather?"))
    text = hermes_call("get_weather", "{}") if call else "Sunny."
    assert talk.sample(text, finish=engine).finish_reason == told
