"""A session on a terminal: readable at 80 columns without colours, and safe with anything in the messages."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from polar.contract.arrays import to_plain
from polar.contract.chat import Image, Message, Text, ToolCall
from polar.contract.result import Reconstruction, SessionResult, Split
from polar.trajectories.show import show_session

from .making import result, trace


def shown(session: SessionResult, tokens: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=80, force_terminal=False, color_system=None, legacy_windows=False)
    console.print(show_session(session, tokens))
    file.flush()
    return raw.getvalue().decode(encoding)


def session() -> SessionResult:
    call = Message("assistant", "", reasoning="let me see", tool_calls=(ToolCall("t", "bash", '{"cmd": "ls"}'),))
    messages = (call, Message("tool", "a.txt", tool_call_id="t"), Message("assistant", "found it"))
    made = result(
        trace(reward=1.0, response_messages=messages),
        trace(metadata={"context_exact": False, "drifted_tokens": 4}, role="subagent"),
    )
    made.trajectory.metadata |= {
        "merge_factor": 2.0,
        "reconstruction": to_plain(
            Reconstruction(
                completions={"trained": ["c0", "c1", "c2", "c3"], "retried": ["c4"]},
                tokens_trained=4,
                splits=[Split("c2", "fork"), Split("c9", "moon_phase")],
            )
        ),
    }
    return made


def test_the_header_has_fates_merge_factor_and_splits_in_words() -> None:
    text = shown(session())
    assert "session s1  task t1  attempt 2  COMPLETED" in text
    assert "reward: 1\n" in text
    assert "model calls: 5 (4 trained, 1 retried)" in text
    assert "traces: 2, 2.00 calls each, 4 tokens trained" in text
    assert "split at c2: another trace already continues the call before it (fork)" in text
    assert "split at c9: moon phase (moon_phase)" in text


def test_warnings_are_in_the_header() -> None:
    warned = session()
    warned.trajectory.metadata["warnings"] = ["tool_choice 'required' was dropped"]
    assert "warning: tool_choice 'required' was dropped" in shown(warned)


@pytest.mark.parametrize(
    ("evaluation", "line"),
    [
        (
            {"exit_code": 1, "timed_out": False, "log_tail": "1 test\ngrep: greeting.txt: No such file\n \n"},
            "test_on_output, reward 0, exit code 1: grep: greeting.txt: No such file",
        ),
        ({"exit_code": -9, "timed_out": True, "log_tail": ""}, "test_on_output, reward 0, timed out"),
        (
            {"exit_code": 0, "tests": {"a": {"expected": "PASSED", "got": None}, "b": {"expected": "1", "got": "1"}}},
            "test_on_output, reward 0, exit code 0, 1 of 2 tests not as expected",
        ),
        ({"strategy": "mine:Own", "outcome_reward": None, "log_tail": 7}, "mine:Own, reward none"),
        ({"outcome_reward": None, "trace_rewards": [0, 1]}, "test_on_output, a reward for each trace"),
        ({"log_tail": "\x1b[2J\rover"}, "test_on_output, reward 0: ?[2J?over"),
    ],
)
def test_why_the_reward_is_what_it_is(evaluation: dict[str, Any], line: str) -> None:
    judged = session()
    judged.trajectory.metadata["evaluation"] = {"strategy": "test_on_output", "outcome_reward": 0.0, **evaluation}
    assert f" evaluation: {line} model calls: " in " ".join(shown(judged).split())


def test_of_a_long_last_line_the_end_is_shown() -> None:
    judged = session()
    judged.trajectory.metadata["evaluation"] = {
        "strategy": "s",
        "outcome_reward": 0,
        "log_tail": "x" * 500 + " the end",
    }
    text = shown(judged)
    assert "evaluation: s, reward 0: ... " in " ".join(text.split())
    assert (text.count("x") < 220, "the end\n" in text) == (True, True)


def test_without_traces_the_reward_is_that_of_the_session() -> None:
    untrained = result()
    untrained.trajectory.metadata["evaluation"] = {"strategy": "session_completed", "outcome_reward": 1.0}
    assert "reward: 1\nevaluation: session_completed, reward 1\n" in shown(untrained)


def test_each_reply_has_its_tokens_and_mean_logprob() -> None:
    text = shown(session())
    assert "assistant  [trained: 1 tokens, mean logprob -0.500]" in text
    assert "assistant  [trained: 1 tokens, mean logprob -0.250]" in text
    assert '-> bash({"cmd": "ls"})' in text
    assert "(thinking) let me see" in text
    assert "2 prompt tokens, 3 response tokens, 2 trained" in text
    assert "context not exact: 4 tokens drifted" in text


def test_the_token_view_marks_trained_tokens_without_colours() -> None:
    text = shown(session(), tokens=True)
    assert "+ 3/-0.50\n. 4\n+ 5/-0.25\n" in "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert "3/-0.50" not in shown(session())


def test_no_line_is_wider_than_the_terminal() -> None:
    wide = session()
    wide.trajectory.traces[0].response_ids = wide.trajectory.traces[0].response_ids + 100_000
    wide.trajectory.traces[0].prompt_messages = (Message("user", "word " * 500), Message("tool", "x" * 5000))
    assert max(len(line) for line in shown(wide, tokens=True).splitlines()) <= 80
    assert "more characters]" in shown(wide)


def test_messages_can_not_drive_the_terminal_or_the_markup() -> None:
    hostile = session()
    hostile.trajectory.traces[0].prompt_messages = (
        Message("tool", "\x1b[2J\x1b]0;owned\x07 [bold]not bold[/bold] \x9b31m \r over"),
        Message("user", (Text("look"), Image("https://example.test/a.png"))),
    )
    text = shown(hostile)
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(text)
    assert "[bold]not bold[/bold]" in text
    assert "[image]" in text


def test_a_failed_session_without_traces() -> None:
    failed = result()
    failed.status, failed.error = "ERROR", "no model call"
    text = shown(failed, encoding="ascii")
    assert "ERROR" in text
    assert "error: no model call" in text
    assert "reward: none" in text
    assert "model calls: 0 (none)" in text


def test_a_terminal_that_knows_ascii_only() -> None:
    assert "trace 1  subagent" in shown(session(), encoding="ascii")
