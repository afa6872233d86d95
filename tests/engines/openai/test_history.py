"""A conversation is written for the engine once, and comes out as if it was written each time."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.contract.chat import Image, Message, Text, ToolCall
from polar.engines.base import EngineError
from polar.engines.openai_history import Histories
from polar.engines.openai_request import wire_message

MESSAGES = st.lists(
    st.sampled_from(
        [
            Message("user", "a"),
            Message("user", 'é"\\]'),
            Message("user", (Text("a"), Image("data:image/png;base64,AA=="))),
            Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("c", "f", "{}"),)),
            Message("tool", "out", tool_call_id="c"),
        ]
    ),
    max_size=4,
)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.integers(0, 6), MESSAGES), max_size=8), st.booleans())
def test_it_is_what_writing_all_of_it_gives(calls: list[tuple[str, int, list[Message]]], room: bool) -> None:
    histories = Histories(1 << 20 if room else 100)
    said: dict[str, tuple[Message, ...]] = {}
    for session, kept, new in calls:
        said[session] = (*said.get(session, ())[:kept], *new)
        whole = orjson.dumps([wire_message(message) for message in said[session]])
        assert orjson.dumps(histories.of(session, said[session])) == whole


def test_what_was_written_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = Histories()
    first = (Message("user", "a"), Message("assistant", "b"))
    histories.of("s", first)
    written: list[object] = []
    monkeypatch.setattr("polar.engines.openai_history.wire_message", lambda m: written.append(m) or wire_message(m))
    histories.of("s", (*first, Message("user", "c")))
    assert written == [Message("user", "c")]


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "\ud83d"),
        Message("assistant", "", reasoning="\ud83d"),
        Message("assistant", "", tool_calls=(ToolCall("c", "\ud83d", "{}"),)),
        Message("assistant", "", tool_calls=(ToolCall("c", "f", '{"a": "\ud83d \\ud83d"}'),)),
    ],
)
def test_after_a_message_that_cannot_be_written_the_rest_is_as_ever(message: Message) -> None:
    histories = Histories()
    good = (Message("user", "a"),)
    histories.of("s", good)
    with pytest.raises(EngineError, match="can't be sent"):
        histories.of("s", (*good, message))
    assert orjson.loads(orjson.dumps(histories.of("s", good))) == [{"role": "user", "content": "a"}]
