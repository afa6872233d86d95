"""What a conversation continues: found from the conversation alone, whatever the harness did to it."""

from __future__ import annotations

import msgspec
import pytest

from polar.capture.graph import SessionGraph
from polar.contract.arrays import ids
from polar.contract.chat import Message, Text, ToolCall
from tests.trajectories.making import completion
from tests.trajectories.toy import ToyGateway, rewritten, system, tool, user


def parent_of(gateway: ToyGateway, messages: list[Message]) -> str | None:
    parent = gateway.graph.attach(messages).parent
    return parent.completion_id if parent else None


def test_a_conversation_continues_its_deepest_reply() -> None:
    gateway, history = ToyGateway(), [system(), user("1")]
    for text in ("2", "3"):
        history += [gateway.call(history).reply, user(text)]
    assert parent_of(gateway, history) == "c1"
    assert parent_of(gateway, history[:4]) == "c0"
    assert parent_of(gateway, history[:2]) is None


def test_a_fork_continues_the_reply_before_it() -> None:
    gateway, history = ToyGateway(), [system(), user("1")]
    history.append(gateway.call(history).reply)
    gateway.call([*history, user("left")])
    assert parent_of(gateway, [*history, user("right")]) == "c0"


def test_an_empty_reply_that_was_never_given_is_left_out() -> None:
    """What opencode keeps of a stream that was cut."""
    gateway, history = ToyGateway(), [system(), user("1")]
    history.append(gateway.call(history).reply)
    second = gateway.call([*history, user("2")])
    history += [user("2"), Message("assistant", (Text(""),)), second.reply, user("3")]
    attachment = gateway.graph.attach(history)
    assert attachment.parent is second
    assert attachment.messages == (*history[:4], *history[5:])


def test_an_empty_reply_that_was_given_is_continued() -> None:
    gateway, history = ToyGateway(), [system(), user("1")]
    history.append(gateway.call(history, reply="").reply)
    assert parent_of(gateway, [*history, user("2")]) == "c0"


def test_of_two_equal_replies_the_one_that_goes_on_is_continued() -> None:
    gateway, start = ToyGateway(), [system(), user("1")]
    first = gateway.call(start, reply="same")
    second = gateway.call(start, reply="same")
    assert parent_of(gateway, [*start, second.reply, user("2")]) == "c1", "the newest, if nothing else tells"
    gone_on = [*start, first.reply, user("2")]
    answer = gateway.finish(gateway.begin(gone_on), reply="done")
    assert parent_of(gateway, [*gone_on, answer.reply, user("3")]) == answer.completion_id


def test_of_two_equal_calls_the_tool_call_id_tells() -> None:
    gateway, start = ToyGateway(), [system(), user("1")]
    first, _ = (gateway.call(start, reply="", tool_call="{}") for _ in range(2))
    assert parent_of(gateway, [*start, first.reply, tool("ok", first)]) == "c0"


def test_the_recorded_form_of_a_reply_is_what_is_rendered() -> None:
    gateway, start = ToyGateway(), [system(), user("1")]
    answer = gateway.call(start, reply="", tool_call='{"b": 1,"a":2}', thinking="hm")
    sent = msgspec.structs.replace(rewritten(answer.reply), reasoning=None)
    attachment = gateway.graph.attach([*start, sent, tool("ok", answer)])
    assert attachment.messages[2] == answer.reply
    assert attachment.parent_messages == 3


def test_other_thinking_is_another_reply() -> None:
    gateway, start = ToyGateway(), [system(), user("1")]
    answer = gateway.call(start, reply="x", thinking="hm")
    other = msgspec.structs.replace(answer.reply, reasoning="something else")
    assert parent_of(gateway, [*start, other, user("2")]) is None


def test_a_harness_that_repairs_broken_arguments_still_continues() -> None:
    gateway, start = ToyGateway(), [system(), user("1")]
    answer = gateway.call(start, reply="", tool_call='{"a": "unfinished')
    repaired = ToolCall(answer.reply.tool_calls[0].id, "bash", "{}")
    sent = msgspec.structs.replace(answer.reply, tool_calls=(repaired,))
    assert parent_of(gateway, [*start, sent, tool("bad arguments", answer)]) == "c0"
    guessed = msgspec.structs.replace(sent, tool_calls=(ToolCall("other", "bash", "{}"),))
    assert parent_of(gateway, [*start, guessed, tool("bad arguments")]) is None


@pytest.mark.parametrize(
    ("conversation", "reason"),
    [
        ([system("other"), user("1")], "new_conversation"),
        ([system(), user("elsewhere")], "new_conversation"),
        ([system(), user("1")], "resampled"),
        ([system(), user("1"), Message("assistant", "never said"), user("2")], "reply_not_recorded"),
        ([system(), user("1"), user("inserted")], "history_edited"),
    ],
)
def test_why_a_conversation_stands_alone(conversation: list[Message], reason: str) -> None:
    gateway = ToyGateway()
    gateway.call([system(), user("1")], reply="x")
    assert gateway.call(conversation).split == reason


def test_the_first_conversation_needs_no_reason() -> None:
    assert ToyGateway().call([system(), user("1")]).split is None


def test_a_resampled_call_stores_its_prompt_once() -> None:
    gateway, start = ToyGateway(), [system(), user("1" * 100)]
    gateway.call(start)
    again = gateway.call(start)
    assert (again.base_id, len(again.prompt_delta), again.messages) == ("c0", 0, ())


def test_adding_a_completion_again_changes_nothing() -> None:
    gateway = ToyGateway()
    first = gateway.call([system(), user("1")])
    gateway.graph.add(first)
    assert gateway.completions() == [first]


def test_a_call_without_any_ids_can_be_continued() -> None:
    """An engine that returned neither prompt nor reply ids must not break the calls after it."""
    silent = completion(0, [], [], outcome="no_token_ids")
    graph = SessionGraph([silent])
    assert graph.ids("c0").tolist() == []
    attachment = graph.attach([*silent.messages, silent.reply, user("on")])
    placement = graph.place(attachment, ids([1, 2]))
    assert (placement.parent_id, placement.shared, placement.split) == ("c0", 0, "parent_without_ids")


def test_hundreds_of_turns_with_twin_replies_are_walked() -> None:
    """Best of two at temperature 0: every reply is there twice, and each is a way to try."""
    gateway, history = ToyGateway(), [user("go")]
    for _ in range(350):
        twins = [gateway.call(history, reply="s", tools=()) for _ in range(2)]
        history += [twins[1].reply, user("n")]
    assert parent_of(gateway, history) == "c699"


def test_a_foreign_message_between_keeps_the_parent() -> None:
    gateway, history = ToyGateway(), [system(), user("1")]
    answer = gateway.call(history)
    history += [answer.reply, user("2"), Message("assistant", "not sampled"), user("3")]
    attachment = gateway.graph.attach(history)
    assert (attachment.parent, attachment.parent_messages) == (answer, 3)
