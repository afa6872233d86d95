"""Who made a call: told by what it asks with, not by what it is called."""

from __future__ import annotations

from polar.capture.graph import SessionGraph
from polar.contract.chat import Message, Text
from polar.trajectories.roles import assign_roles

from .making import completion, following
from .toy import BASH, ToyGateway, system, user


def roles(gateway: ToyGateway) -> list[str]:
    return list(assign_roles(gateway.graph, gateway.completions()).values())


def test_a_title_before_the_first_turn_is_auxiliary() -> None:
    gateway = ToyGateway()
    gateway.call([system("write a title"), user("task")], ())
    gateway.call([system("agent"), user("task")], (BASH,))
    assert roles(gateway) == ["auxiliary", "main"]


def test_a_sub_agent_has_its_own_system_text() -> None:
    gateway = ToyGateway()
    for text in ("agent", "helper", "agent"):
        gateway.call([system(text), user(f"to {text}")])
    assert roles(gateway) == ["main", "subagent", "main"]


def test_a_restart_after_compaction_is_main_and_the_summary_is_auxiliary() -> None:
    gateway, history = ToyGateway(), [system(), user("task")]
    history.append(gateway.call(history).reply)
    summary = gateway.call([*history, user("sum it up")], ())
    gateway.call([system(), user(str(summary.reply.content))])
    assert roles(gateway) == ["main", "auxiliary", "main"]


def compacted(gateway: ToyGateway, tries: int = 1) -> list[Message]:
    """A conversation, then ``tries`` at a summary with all its tools; the next conversation begins with the last."""
    history = [system(), user("task")]
    for _ in range(2):
        history += [gateway.call(history).reply, user("more")]
    asked = [[*history[:-1], user(f"sum it up {at}")] for at in range(tries)]
    words = [gateway.call(ask, reply=f"the bears were counted: {at}").reply.content for at, ask in enumerate(asked)]
    return [system(), user(f"Going on from here: {words[-1]}")]


def test_a_summary_that_is_asked_for_with_all_tools_is_auxiliary() -> None:
    gateway = ToyGateway()
    gateway.call(compacted(gateway))
    assert roles(gateway) == ["main", "main", "auxiliary", "main"]


def test_so_are_the_tries_before_it() -> None:
    gateway = ToyGateway()
    gateway.call(compacted(gateway, tries=2))
    assert roles(gateway) == ["main", "main", "auxiliary", "auxiliary", "main"]


def test_a_last_answer_before_a_conversation_about_something_else_is_main() -> None:
    gateway = ToyGateway()
    compacted(gateway)
    gateway.call([system(), user("another task")])
    assert roles(gateway) == ["main"] * 4


def test_an_answer_that_another_agent_is_told_is_main() -> None:
    gateway = ToyGateway()
    told = compacted(gateway)[1]
    gateway.call([system("helper"), told])
    assert roles(gateway) == ["main", "main", "main", "subagent"]


def test_without_tools_anywhere_the_system_text_decides() -> None:
    gateway = ToyGateway()
    for text in ("agent", "critic", "agent"):
        gateway.call([system(text), user(f"to {text}")], ())
    assert roles(gateway) == ["main", "subagent", "main"]


def test_the_leading_system_text_counts_in_whatever_blocks_it_comes() -> None:
    gateway = ToyGateway()
    gateway.call([system("agent"), user("1")])
    gateway.call([Message("system", (Text("age"), Text("nt"))), user("2")])
    gateway.call([user("3"), system("agent")])
    assert roles(gateway) == ["main", "main", "subagent"]


def test_a_fork_of_main_is_main() -> None:
    gateway, history = ToyGateway(), [system(), user("task")]
    history.append(gateway.call(history).reply)
    for branch in ("a", "b"):
        gateway.call([*history, user(branch)])
    assert roles(gateway) == ["main", "main", "main"]


def test_what_the_harness_says_wins_and_does_not_define_main() -> None:
    helper = completion(0, [1], [2], tools=(BASH,), role_hint="subagent", messages=(system("helper"), user("x")))
    main = completion(1, [3], [4], tools=(BASH,), messages=(system("agent"), user("y")))
    side = following(main, [5], [6], role_hint="auxiliary", tools=(BASH,))
    strange = following(main, [7], [8], seq=3, role_hint="something else", tools=(BASH,))
    everything = [helper, main, side, strange]
    found = assign_roles(SessionGraph(everything), everything)
    assert list(found.values()) == ["subagent", "main", "auxiliary", "main"]


def test_a_session_of_hinted_side_calls_only() -> None:
    only = completion(0, [1], [2], role_hint="auxiliary")
    assert assign_roles(SessionGraph([only]), [only]) == {"c0": "auxiliary"}
    assert assign_roles(SessionGraph(), []) == {}
