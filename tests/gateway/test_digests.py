"""The digest of a call is of what it asks, whatever was asked before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.contract.chat import Chat, Image, Message, Sampling, Text, ToolCall
from polar.dialects.base import Call
from polar.gateway.digests import CallDigests

MESSAGES = st.lists(
    st.sampled_from(
        [
            Message("user", ""),
            Message("user", "a"),
            Message("user", (Text("a"), Image("https://x/y.png"))),
            Message("assistant", "a", reasoning="b", tool_calls=(ToolCall("c", "f", "{}"),)),
            Message("tool", "a", tool_call_id="c"),
        ]
    ),
    max_size=4,
)


def call(messages: tuple[Message, ...], temperature: float = 1.0) -> Call:
    return Call(Chat(model="m", messages=messages, sampling=Sampling(temperature=temperature)), stream=False)


@given(st.lists(st.tuples(st.integers(0, 6), MESSAGES), min_size=1, max_size=8))
def test_it_does_not_matter_what_came_before(steps: list[tuple[int, list[Message]]]) -> None:
    digests, said, seen = CallDigests(), tuple[Message, ...](), dict[bytes, tuple[Message, ...]]()
    for kept, new in steps:
        said = (*said[:kept], *new)
        digest = digests.of("chat", call(said))
        assert digest == CallDigests().of("chat", call(said))
        assert seen.setdefault(digest, said) == said


def test_dialect_settings_and_place_in_the_conversation_count() -> None:
    digests, said = CallDigests(), (Message("user", "a"), Message("user", "b"))
    asked = [
        digests.of("chat", call(said)),
        digests.of("other", call(said)),
        digests.of("chat", call(said, temperature=0.5)),
        digests.of("chat", call(said[::-1])),
        digests.of("chat", Call(call(said).chat, stream=False, previous_id="p")),
    ]
    assert len(set(asked)) == len(asked)
    assert {len(digest) for digest in asked} == {16}
