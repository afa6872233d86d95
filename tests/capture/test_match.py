"""When two messages are the same message (and when they are not)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.capture.match import arguments_key, message_key, reasoning_agrees, repaired_agrees
from polar.contract.chat import Image, Message, Text, ToolCall

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_arguments_are_what_they_say_and_not_how_they_are_written(arguments: dict[str, Any]) -> None:
    forms = [
        json.dumps(arguments),
        json.dumps(dict(reversed(arguments.items())), indent=2, ensure_ascii=False),
        json.dumps(arguments, separators=(",", ":"), sort_keys=True),
    ]
    assert len({arguments_key(form) for form in forms}) == 1


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_any_text_has_a_key(text: str) -> None:
    assert arguments_key(text) == arguments_key(text)
    assert isinstance(message_key(Message("assistant", text, tool_calls=(ToolCall("i", "f", text),))), tuple)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ('{"n": 9000.0}', '{"n":9000}', True),
        ("", "{}", True),
        ('{"n": 1}', '{"n": "1"}', False),
        ('{"n": true}', '{"n": 1}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"broken": ', '{"broken": ', True),
        ('{"broken": ', '{"broken":', False),
        ('{"n": 1e400}', '{"n": 1e400}', True),
        ('{"n": 123456789012345678901}', '{"n": 123456789012345678902}', False),
    ],
)
def test_numbers_and_broken_text(one: str, other: str, same: bool) -> None:
    assert (arguments_key(one) == arguments_key(other)) is same


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("hi", (Text("hi"),), True),
        ("hi", (Text("hi"), Text("")), True),
        ("", (Text(""),), True),
        ("", (), True),
        ("ab", (Text("a"), Text("b")), False),
        ((Text("a"), Text("b")), (Text("b"), Text("a")), False),
        ((Image("u"),), (Image("v"),), False),
        ((Image("u"), Text("")), (Image("u"),), True),
        ("u", (Image("u"),), False),
        ("hi", "hi ", False),
    ],
)
def test_blocks_of_text(one: Any, other: Any, same: bool) -> None:
    assert (message_key(Message("user", one)) == message_key(Message("user", other))) is same


def test_roles_and_function_names_tell_messages_apart() -> None:
    assert message_key(Message("user", "x")) != message_key(Message("system", "x"))
    one, other = (Message("assistant", tool_calls=(ToolCall("i", name, "{}"),)) for name in ("f", "g"))
    assert message_key(one) != message_key(other)


@pytest.mark.parametrize(
    ("recorded", "sent", "agree"),
    [("hm", None, True), ("hm", "", True), ("hm\n", " hm", True), ("hm", "no", False), (None, "hm", False)],
)
def test_thinking_may_be_left_out_but_not_changed(recorded: str | None, sent: str | None, agree: bool) -> None:
    assert reasoning_agrees(recorded, sent) is agree


def reply(*calls: ToolCall, content: str = "text", reasoning: str | None = None) -> Message:
    return Message("assistant", content, reasoning=reasoning, tool_calls=calls)


def test_only_calls_that_were_broken_may_be_repaired() -> None:
    broken, whole = ToolCall("1", "f", '{"a'), ToolCall("2", "g", '{"a": 1}')
    repaired = ToolCall("1", "f", "{}")
    ours = reply(broken, whole)
    assert repaired_agrees(ours, reply(repaired, ToolCall("2", "g", '{"a":1}')))
    assert not repaired_agrees(ours, reply(repaired, ToolCall("2", "g", '{"a":2}')))
    assert not repaired_agrees(ours, reply(repaired))
    assert not repaired_agrees(reply(), reply())
    assert not repaired_agrees(reply(whole), reply(whole))


def test_beside_a_repaired_call_nothing_else_may_be_edited() -> None:
    ours = reply(ToolCall("1", "f", '{"a'), reasoning="why")
    assert repaired_agrees(ours, reply(ToolCall("1", "f", "{}")))
    assert not repaired_agrees(ours, reply(ToolCall("1", "f", "{}"), content="other"))
    assert not repaired_agrees(ours, reply(ToolCall("1", "f", "{}"), reasoning="other"))
