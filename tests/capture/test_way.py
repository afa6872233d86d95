"""The newest conversation's way is remembered; what is found must be what a graph finds that remembers nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.capture.graph import SessionGraph
from polar.contract.chat import Message, Text, ToolCall
from tests.trajectories.toy import Call, ToyGateway

BROKEN = Message("assistant", tool_calls=(ToolCall("c1", "f", "{"),))
SENT = [
    Message("system", "a"),
    Message("user", "a"),
    Message("user", (Text("a"), Text(""))),
    Message("tool", "a", tool_call_id="c1"),
    Message("tool", "b", tool_call_id="c2"),
    Message("assistant", "a"),
    Message("assistant", "a", reasoning="b"),
    Message("assistant", ""),
    BROKEN,
    Message("assistant", tool_calls=(ToolCall("c1", "f", "{}"),)),
]
REPLIES = st.sampled_from(["", "a", "b", "c"])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 4).map(lambda n: n and n + 1),  # how much of the conversation goes on, from its end
        st.lists(st.sampled_from(SENT), max_size=2),
        st.sampled_from(["not", "now", "later", "later"]),
        REPLIES,
    ),
    max_size=20,
)


@given(STEPS)
def test_remembering_changes_nothing(steps: list[tuple[int, list[Message], str, str]]) -> None:
    gateway, said, flying = ToyGateway(mode="chat"), list[Message](), list[Call]()
    for dropped, new, sampled, reply in steps:
        said = [*said[: len(said) - dropped if dropped < len(said) else 0], *new]
        if sampled == "later" and flying:
            gateway.finish(flying.pop(0), reply=reply)
        found, fresh = gateway.graph.attach(said), SessionGraph(gateway.completions()).attach(said)
        assert found == fresh
        assert found.parent is fresh.parent
        assert found.base_ids.tolist() == fresh.base_ids.tolist()
        if sampled != "not" and said:
            flying.append(gateway.begin(said))
        if sampled == "now" and flying:
            said = [*said, gateway.finish(flying.pop(), reply=reply).reply]


def test_a_reply_that_comes_late_is_seen_by_those_who_know_its_twin() -> None:
    gateway, start = ToyGateway(), [Message("user", "1")]
    slow = gateway.begin(start)
    first = gateway.call(start, reply="same")
    gone_on = [*start, first.reply, Message("user", "2")]
    assert gateway.graph.attach(gone_on).parent is first
    second = gateway.finish(slow, reply="same")
    assert gateway.graph.attach(gone_on).parent is second, "the newest, if nothing else tells"
