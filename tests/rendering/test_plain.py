"""Plain text to ids: exact where it can be, and unproven where the tokens could depend on what stands before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.rendering import load_renderer
from polar.rendering.plain import PlainText
from tests.support.tinymodel import make_tiny_model


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainText:
    return load_renderer(make_tiny_model(tmp_path_factory.mktemp("plain"))).plain


PIECES = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "user", " a", "\n", "é", "<think>", "x"]), max_size=8
)


@given(PIECES.map("".join), PIECES.map("".join))
def test_a_proven_tail_is_what_the_whole_text_is_tokenized_to(plain: PlainText, before: str, after: str) -> None:
    start = plain.encode(before, special=False)
    tail = plain.tail(start, after)
    if tail is not None:
        whole = plain.encode(before + after, special=False)
        assert [*start, *tail] == whole.tolist()


def test_text_between_plain_words_is_not_proven(plain: PlainText) -> None:
    assert plain.tail(plain.encode("wor", special=False), "ld") is None
    assert plain.tail(plain.encode("wor<|im_end|>", special=False), "ld") is not None
    assert plain.tail(plain.encode("wor", special=False), "<|im_end|>ld") is not None


def test_control_tokens_in_a_plain_prompt_are_meant_as_such(plain: PlainText, tmp_path: Path) -> None:
    ids = plain.encode("<|im_start|>user\nhi<|im_end|>", special=False)
    assert plain.decode(ids.tolist()) == "<|im_start|>user\nhi<|im_end|>"
    assert len(plain.encode("<|im_end|>", special=False)) == 1


def test_marks_and_halves_of_characters_in_a_prompt_are_text(plain: PlainText) -> None:
    assert plain.decode(plain.encode("a\ufdd0b", special=False).tolist()) == "a\ufdd0b"
    assert plain.decode(plain.encode("a\ud800b", special=False).tolist()) == "a\ufffdb"


def test_a_reader_gives_markup_as_text_and_stops_at_a_stop_string(plain: PlainText) -> None:
    reader = plain.reader(["END"])
    ids = plain.encode("<think>a</think> <tool_call>{}</tool_call> END more", special=False).tolist()
    reader.feed(ids)
    reply = reader.finish("stop")
    assert reply.message.content == "<think>a</think> <tool_call>{}</tool_call> "
    assert (reply.message.reasoning, reply.message.tool_calls, reply.stop_sequence) == (None, (), "END")
