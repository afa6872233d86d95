"""Which calls share a trace: each test is a way in which a session's tokens do or do not go on."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from polar.contract.chat import Image, Message, Text, ToolCall
from polar.contract.completion import Completion, WeightSpan
from polar.contract.errors import PolarError
from polar.contract.task import BuilderSpec
from polar.trajectories import make_builder
from polar.trajectories.base import Built

from .making import completion, following, long_session
from .oracle import check_accounts, check_session
from .toy import TOOL, USER, Template, ToyGateway, rewritten, system, tool, user


def build(completions: list[Completion], **config: object) -> Built:
    return make_builder(BuilderSpec(config=config)).build(completions)


def build_session(gateway: ToyGateway, **config: object) -> Built:
    """Build, and hold the result against what the engine logged."""
    built = build(gateway.completions(), **config)
    check_session(gateway, built)
    return built


def chains(built: Built) -> list[list[str]]:
    return [list(trace.completion_ids) for trace in built.traces]


def reasons(built: Built) -> dict[str, str]:
    return {split.completion_id: split.reason for split in built.reconstruction.splits}


def talk(gateway: ToyGateway, history: list[Message], text: str, reply: str = "xy", **how: object) -> Completion:
    """A user turn and its reply, which goes into the history as it was sampled."""
    history.append(user(text))
    answer = gateway.call(history, reply=reply, **how)
    history.append(answer.reply)
    return answer


def test_b14_a_break_at_the_third_call_gives_two_traces_and_drops_none() -> None:
    gateway, history = ToyGateway(mode="chat"), [system()]
    for turn in range(5):
        talk(gateway, history, f"u{turn}", reply="ab", spelled=turn == 1)
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1"], ["c2", "c3", "c4"]]
    assert reasons(built) == {"c2": "retokenized"}


def test_b15_interleaved_agents_are_one_trace_each() -> None:
    gateway, main, helper = ToyGateway(), [system("main")], [system("helper")]
    for turn in range(2):
        talk(gateway, main, f"m{turn}")
        talk(gateway, helper, f"s{turn}")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c2"], ["c1", "c3"]]
    assert [trace.role for trace in built.traces] == ["main", "subagent"]
    assert reasons(built) == {"c1": "new_conversation"}


def test_b16_a_fork_trains_the_shared_prefix_once() -> None:
    gateway, history = ToyGateway(), [system()]
    first = talk(gateway, history, "m1")
    for text in ("a", "b"):
        talk(gateway, list(history), text, reply="zz")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1"], ["c2"]]
    assert reasons(built) == {"c2": "fork"}
    assert built.traces[1].prompt_ids.tolist()[: first.total_len] == gateway.graph.ids("c0").tolist()
    assert built.traces[1].loss_mask.tolist() == [1] * 3


def test_the_longest_branch_owns_the_shared_prefix_and_stands_first() -> None:
    gateway, history = ToyGateway(), [system()]
    talk(gateway, history, "m1")
    talk(gateway, list(history), "short")
    talk(gateway, history, "long")
    talk(gateway, history, "longer")
    assert chains(build_session(gateway)) == [["c0", "c2", "c3"], ["c1"]]


def test_a_fork_inside_a_fork() -> None:
    gateway, trunk = ToyGateway(), [system()]
    talk(gateway, trunk, "m")
    left, right = list(trunk), list(trunk)
    talk(gateway, left, "l")
    talk(gateway, right, "r")
    talk(gateway, list(left), "l1")
    talk(gateway, list(left), "l2")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1", "c3"], ["c2"], ["c4"]]
    assert built.traces[2].prompt_messages[:5] == tuple(left)


def test_best_of_two_asked_at_once_are_two_traces() -> None:
    gateway = ToyGateway()
    calls = [gateway.begin([system(), user("go")]) for _ in range(2)]
    kept = gateway.finish(calls[1], reply="one")
    gateway.finish(calls[0], reply="two")
    talk(gateway, [system(), user("go"), kept.reply], "on")
    built = build_session(gateway)
    assert chains(built) == [["c0"], ["c1", "c2"]]
    assert built.traces[0].prompt_ids.tolist() == built.traces[1].prompt_ids.tolist()


@pytest.mark.parametrize("opener", [TOOL, USER])
def test_a11_a_stop_token_that_opens_the_next_turn_stands_once(opener: int) -> None:
    gateway = ToyGateway(template=Template(opener_stops=True))
    history = [system(), user("go")]
    call = gateway.call(history, reply="x", tool_call="{}" if opener == TOOL else None)
    history += [call.reply, tool("done", call) if opener == TOOL else user("more")]
    gateway.call(history, reply="y")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1"]]
    full = [*built.traces[0].prompt_ids.tolist(), *built.traces[0].response_ids.tolist()]
    assert full.count(opener) == gateway.log["c1"].context.count(opener) + gateway.log["c1"].sampled.count(opener)
    at = built.traces[0].metadata["replies"][0][2]
    assert built.traces[0].response_ids[at - 1] == opener
    assert built.traces[0].response_ids[at] != opener


def test_a10_what_the_harness_says_for_the_model_is_context() -> None:
    gateway, history = ToyGateway(), [system()]
    talk(gateway, history, "go")
    history += [user("more"), Message("assistant", "I have reached the maximum iterations")]
    talk(gateway, history, "wrap up")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1"]]
    sampled = sum(len(gateway.log[name].sampled) for name in ("c0", "c1"))
    assert built.reconstruction.tokens_trained == sampled
    assert len(built.traces[0].metadata["replies"]) == 2
    assert [m.role for m in built.traces[0].response_messages].count("assistant") == 3


def test_a10_a_reply_that_was_never_sampled_here_begins_a_trace() -> None:
    gateway, history = ToyGateway(), [system(), user("go")]
    gateway.call(history, reply="real")
    gateway.call([*history, Message("assistant", "not mine"), user("on")])
    assert reasons(build_session(gateway)) == {"c1": "reply_not_recorded"}


@pytest.mark.parametrize("fault", ["sentinel", "nan"])
def test_a8_a_reply_without_real_logprobs_is_context_and_named(fault: str) -> None:
    gateway, history = ToyGateway(), [system()]
    talk(gateway, history, "1")
    talk(gateway, history, "2", fault=fault)
    talk(gateway, history, "3")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c2"]]
    assert built.reconstruction.completions == {"trained": ["c0", "c2"], "logprob_missing": ["c1"]}


@pytest.mark.parametrize("arguments", ['{"folder":"tmp","n":1.0}', '{ "n": 1, "folder": "tmp" }'])
def test_b7_rewritten_tool_arguments_continue_the_trace(arguments: str) -> None:
    gateway, history = ToyGateway(), [system(), user("go")]
    call = gateway.call(history, reply="", tool_call=arguments)
    assert rewritten(call.reply) != call.reply
    gateway.call([*history, rewritten(call.reply), tool("ok", call)])
    assert chains(build_session(gateway)) == [["c0", "c1"]]


def test_b12_an_empty_text_block_beside_a_tool_call_changes_nothing() -> None:
    gateway, history = ToyGateway(), [system(), user("go")]
    call = gateway.call(history, reply="", tool_call="{}")
    gateway.call([*history, msgspec.structs.replace(call.reply, content=(Text(""),)), tool("ok", call)])
    assert chains(build_session(gateway)) == [["c0", "c1"]]


def test_b1_a_template_that_keeps_thinking_extends_byte_for_byte() -> None:
    gateway, history = ToyGateway(), [system()]
    for turn in range(3):
        answer = talk(gateway, history, f"u{turn}", thinking="hm")
        history[-1] = msgspec.structs.replace(answer.reply, reasoning=None)
    assert chains(build_session(gateway)) == [["c0", "c1", "c2"]]


@pytest.mark.parametrize("mode", ["tito", "chat"])
def test_b2_a_template_that_drops_thinking_breaks_at_the_next_user_and_not_in_the_tool_loop(mode: str) -> None:
    gateway, history = ToyGateway(mode=mode, template=Template(drops_thinking=True)), [system(), user("go")]
    call = gateway.call(history, reply="", tool_call="{}", thinking="hm")
    history += [call.reply, tool("ok", call)]
    history.append(gateway.call(history, reply="done", thinking="hm").reply)
    talk(gateway, history, "and now")
    built = build_session(gateway)
    assert chains(built) == [["c0", "c1"], ["c2"]]
    expected = "template_rewrites_history" if mode == "tito" else "retokenized"
    assert reasons(built) == {"c2": expected}


def test_a_reply_cut_at_the_limit_still_trains() -> None:
    gateway, history = ToyGateway(), [system()]
    talk(gateway, history, "1", fault="length")
    built = build_session(gateway)
    assert chains(built) == [["c0"]]
    assert built.traces[0].finish_reason == "length"


def test_a_trace_does_not_end_in_untrained_replies() -> None:
    gateway, history = ToyGateway(), [system()]
    talk(gateway, history, "1")
    talk(gateway, history, "2", fault="nan")
    talk(gateway, history, "3", fault="nan")
    built = build_session(gateway)
    assert chains(built) == [["c0"]]
    assert len(built.traces[0].response_ids) == len(gateway.log["c0"].sampled)


def test_a_session_with_nothing_to_train_has_no_trace_and_says_why() -> None:
    gateway = ToyGateway()
    for fault in ("abort", "no_ids", "abandon"):
        gateway.call([system(), user(fault)], fault=fault)
    built = build_session(gateway)
    assert built.traces == []
    assert built.reconstruction.completions == {"aborted": ["c0"], "no_token_ids": ["c1"], "abandoned": ["c2"]}
    assert built.reconstruction.splits == []


def test_a_session_without_calls_is_empty() -> None:
    built = build([])
    assert (built.traces, built.reconstruction.completions, built.reconstruction.tokens_trained) == ([], {}, 0)


def test_an_abandoned_call_that_was_asked_again_is_retried() -> None:
    gateway, messages = ToyGateway(), [system(), user("go")]
    gateway.call(messages, fault="abandon", digest=b"same")
    gateway.call(messages, digest=b"same")
    gateway.call(messages, fault="abandon", digest=b"same")
    assert build_session(gateway).reconstruction.completions == {
        "retried": ["c0"],
        "trained": ["c1"],
        "abandoned": ["c2"],
    }


def test_a_summary_inside_a_conversation_is_its_own_trace_and_the_conversation_goes_on() -> None:
    first = completion(0, [1, 2], [3, 4])
    summary = following(first, [5], [6, 7], role_hint="auxiliary")
    back = following(summary, [8], [9])
    built = build([first, summary, back])
    check_accounts([first, summary, back], built)
    assert chains(built) == [["c0", "c2"], ["c1"]]
    assert [trace.role for trace in built.traces] == ["main", "auxiliary"]
    assert built.traces[0].response_ids.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert built.traces[0].loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1]
    assert built.traces[1].prompt_ids.tolist() == [1, 2, 3, 4, 5]
    assert reasons(built) == {"c1": "role_changed"}


def test_roles_left_out_are_named() -> None:
    gateway = ToyGateway()
    talk(gateway, [system()], "work")
    gateway.call([system("titles"), user("title")], ())
    built = build_session(gateway, include_roles=["main"])
    assert built.reconstruction.completions == {"trained": ["c0"], "excluded_role": ["c1"]}


def test_weight_versions_change_inside_a_reply_and_names_get_numbers() -> None:
    first = completion(0, [1], [2, 3, 4], weight_spans=(WeightSpan("41", 0, 1), WeightSpan("step-b", 1, 3)))
    second = following(first, [5], [6], weight_spans=(WeightSpan("step-a", 0, 1),))
    third = following(second, [7], [8])
    trace = build([third, second, first]).traces[0]
    assert trace.weight_versions.tolist() == [41, 42, 42, -1, 43, -1, 0]
    assert trace.metadata["weight_version_names"] == {"step-b": 42, "step-a": 43}


def test_what_a_trace_says_of_itself() -> None:
    picture = Message("user", (Text("look"), Image("https://example.test/a.png")))
    gateway = ToyGateway()
    gateway.call([system(), picture], reply="ok", temperature=0.7)
    trace = build(gateway.completions()).traces[0]
    assert trace.metadata == {
        "context_exact": True,
        "model": "toy-1",
        "dialect": "openai_chat",
        "replies": [[0, 0, 3]],
        "temperature": 0.7,
        "weight_version_min": 7,
        "weight_version_max": 7,
    }
    assert trace.images == ("https://example.test/a.png",)
    assert trace.tools == gateway.completions()[0].tools


def test_splice_joins_across_a_retokenized_reply_and_marks_it() -> None:
    gateway, history = ToyGateway(mode="chat"), [system()]
    talk(gateway, history, "1", reply="ab", spelled=True)
    talk(gateway, history, "2", reply="xy")
    built = build_session(gateway, drift="splice")
    assert chains(built) == [["c0", "c1"]]
    trace = built.traces[0]
    assert trace.metadata["context_exact"] is False
    assert trace.metadata["drifted_tokens"] == 3, "a, b and the end were one pair and the end"
    assert reasons(built) == {}


def test_splice_finds_the_end_of_turn_of_a_cut_reply_by_its_id() -> None:
    first = completion(0, [1], [20, 21, 22], finish_reason="length")
    drifted = completion(
        1, [30, 9, 5], [6], parent_id="c0", base_id="c0", shared=2, shared_messages=2, split="retokenized"
    )
    assert chains(build([first, drifted], drift="splice")) == [["c0"], ["c1"]]
    assert chains(build([first, drifted], drift="splice", end_of_turn_token_id=99)) == [["c0"], ["c1"]]
    built = build([first, drifted], drift="splice", end_of_turn_token_id=9)
    assert chains(built) == [["c0", "c1"]]
    assert built.traces[0].response_ids.tolist() == [20, 21, 22, 5, 6]
    assert built.traces[0].metadata["drifted_tokens"] == 2


def test_splice_does_not_join_where_the_prompt_itself_changed() -> None:
    first = completion(0, [1, 2, 3], [20, 9])
    edited = completion(1, [7, 20, 9, 5], [6], parent_id="c0", base_id="c0", shared=2, shared_messages=2)
    assert chains(build([first, edited], drift="splice")) == [["c0"], ["c1"]]


def test_a_completion_whose_base_is_missing_is_an_error_that_names_it() -> None:
    first = completion(0, [1], [2])
    with pytest.raises(PolarError, match=r"completion c1 builds on c0, which is not among"):
        build([following(first, [3], [4])])


def test_tool_call_ids_of_the_harness_do_not_break_the_trace() -> None:
    gateway, history = ToyGateway(), [system(), user("go")]
    call = gateway.call(history, reply="", tool_call='{"a": 1}')
    own = msgspec.structs.replace(call.reply, tool_calls=(ToolCall("theirs", "bash", '{"a":1}'),))
    gateway.call([*history, own, Message("tool", "ok", tool_call_id="theirs")])
    assert chains(build_session(gateway)) == [["c0", "c1"]]


def test_a_long_session_is_built_without_copies_of_every_turn() -> None:
    completions = long_session(turns=100, tokens=100_000)
    build(completions[:2])
    tracemalloc.start()
    built = build(completions)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(built.traces) == 1
    assert len(built.traces[0].prompt_ids) + len(built.traces[0].response_ids) == 100_000
    assert peak < 8_000_000
