"""What harnesses do to a history: where it is harmless the call continues its parent in our own record's words, and
where it is not it continues nothing that it changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.capture.graph import SessionGraph
from polar.contract.arrays import ids
from polar.contract.chat import Message, Text, ToolCall
from polar.contract.completion import Completion
from tests.trajectories.making import completion
from tests.trajectories.toy import system, tool, user

ARGUMENTS: list[dict[str, Any]] = [
    {"a": 1, "b": [2.0, {"c": "é\n", "d": None}]},
    {"n": 9000.0},
    {},
    {"x": "", "y": -1},
]
THOUGHTS = (None, "hm", "first this,\nthen that")


@dataclass
class Talk:
    """A conversation and the graph of its calls."""

    graph: SessionGraph = field(default_factory=SessionGraph)
    history: list[Message] = field(default_factory=lambda: [system(), user("begin")])
    made: list[Completion] = field(default_factory=list)

    def turn(self, calls: int, thought: int) -> None:
        """A reply with so many tool calls, and what comes after it."""
        n = len(self.made)
        called = tuple(
            ToolCall(f"c{n}_{i}", f"f{i % 2}", json.dumps(ARGUMENTS[(n + i) % len(ARGUMENTS)])) for i in range(calls)
        )
        reply = Message("assistant", f"said {n}", reasoning=THOUGHTS[thought], tool_calls=called)
        attachment = self.graph.attach(self.history)
        prompt = ids([*attachment.base_ids.tolist(), 1000 + n])
        placed = self.graph.place(attachment, prompt)
        made = completion(
            n,
            prompt.tolist()[placed.shared :],
            [2000 + n, 3000 + n],
            messages=attachment.messages[placed.shared_messages :],
            parent_id=placed.parent_id,
            base_id=placed.base_id,
            shared=placed.shared,
            shared_messages=placed.shared_messages,
        )
        made.reply = reply
        self.graph.add(made)
        self.made.append(made)
        results = [Message("tool", f"result {i % 2}", tool_call_id=call.id) for i, call in enumerate(called)]
        self.history += [reply, *(results or [user(f"more {n}")])]


def arguments(call: ToolCall, write: Callable[[Any], str]) -> ToolCall:
    return ToolCall(call.id, call.name, write(json.loads(call.arguments)))


def in_other_words(draw: st.DrawFn, message: Message) -> Message:
    """The same message as some harness writes it."""
    content: Any = message.content
    if content and isinstance(content, str) and draw(st.booleans()):
        content = (Text(content), *[Text("")] * draw(st.integers(0, 1)))
    write = draw(
        st.sampled_from(
            [
                json.dumps,
                lambda value: json.dumps(dict(reversed(value.items())), ensure_ascii=False),
                lambda value: json.dumps(value, indent=2, sort_keys=True).replace("9000.0", "9000"),
                lambda value: json.dumps(value) if value else "",
            ]
        )
    )
    thinking = message.reasoning
    if thinking:
        thinking = draw(st.sampled_from([thinking, None, "", f" {thinking}\n"]))
    calls = tuple(arguments(call, write) for call in message.tool_calls)
    return replace(message, content=content, reasoning=thinking, tool_calls=calls)


@st.composite
def talks(draw: st.DrawFn) -> Talk:
    talk = Talk()
    for calls, thought in draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=5)):
        talk.turn(calls, thought)
    return talk


@st.composite
def rewritten(draw: st.DrawFn) -> tuple[Talk, list[Message]]:
    """A talk, and its history after whatever harnesses do without harm."""
    talk = draw(talks())
    known = talk.history[: len(talk.history) - 1 - _last_run(talk.history)]
    sent: list[Message] = []
    run: list[Message] = []
    for message in [*known, user("")]:
        if message.role == "tool":
            run.append(message)
            continue
        sent += draw(st.permutations(run))
        run = []
        sent += [Message("assistant", (Text(""),))] * (message.role == "user" and draw(st.integers(0, 1)))
        sent.append(message)
    return talk, [in_other_words(draw, message) for message in sent[:-1]]


def _last_run(history: list[Message]) -> int:
    """How many messages after the last reply, less one."""
    return next(i for i, message in enumerate(reversed(history)) if message.role == "assistant") - 1


@settings(max_examples=200, deadline=None)
@given(rewritten())
def test_a_history_in_other_words_continues_its_last_reply(made: tuple[Talk, list[Message]]) -> None:
    talk, sent = made
    last = talk.made[-1]
    found = talk.graph.attach([*sent, user("new")])
    assert found.parent is last
    assert list(found.messages) == [*talk.graph.conversation(last), user("new")], "in the words of the record"
    assert found.base_ids.tolist() == talk.graph.ids(last.completion_id).tolist()


def harmed(draw: st.DrawFn, history: list[Message], at: int) -> list[Message]:
    """The history with one message that does not say any more what it said."""
    message = history[at]
    ways: list[Any] = [[replace(message, content=f"{message.content}!")], [user("between"), message]]
    if at + 1 < len(history):
        ways.append([])
    if message.reasoning:
        ways.append([replace(message, reasoning="another thought")])
    if message.tool_calls:
        first, *rest = message.tool_calls
        ways.append([replace(message, tool_calls=tuple(rest))])
        ways.append([replace(message, tool_calls=(arguments(first, lambda v: json.dumps(v | {"z": 1})), *rest))])
    other = history[at + 1] if at + 1 < len(history) else message
    if message.role == other.role == "tool" and message is not other:
        swapped = [replace(message, content=other.content), replace(other, content=message.content)]
        return [*history[:at], *swapped, *history[at + 2 :]]
    return [*history[:at], *draw(st.sampled_from(ways)), *history[at + 1 :]]


@settings(max_examples=300, deadline=None)
@given(talks(), st.data())
def test_a_history_that_says_something_else_continues_nothing_behind_it(talk: Talk, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(talk.history) - 1))
    found = talk.graph.attach([*harmed(data.draw, talk.history, at), user("new")])
    assert found.parent_messages <= at
    whole = [*talk.graph.conversation(found.parent)] if found.parent else []
    assert talk.history[: found.parent_messages] == whole


def test_results_in_another_order_are_those_of_the_record() -> None:
    talk = Talk()
    talk.turn(3, 0)
    talk.turn(0, 0)
    *start, one, two, three, said, _ = talk.history
    for order in ([three, one, two], [two, one, three]):
        found = talk.graph.attach([*start, *order, said, user("on")])
        assert (found.parent, found.messages[3:6]) == (talk.made[1], (one, two, three))
    assert talk.graph.attach([*start, two, three, said, user("on")]).parent is talk.made[0]
    assert talk.graph.attach([*start, two, one, three, tool("a fourth")]).messages[3:5] == (two, one)


def test_many_equal_results_are_told_apart_at_once() -> None:
    talk = Talk()
    talk.turn(300, 0)
    talk.turn(0, 0)
    *start, said, _ = talk.history
    results = start[3:]
    assert talk.graph.attach([*start[:3], *reversed(results), said]).parent is talk.made[1]
    same = [replace(result, content="result 0", tool_call_id="c0_0") for result in results]
    assert talk.graph.attach([*start[:3], *same, said]).parent is talk.made[0]
