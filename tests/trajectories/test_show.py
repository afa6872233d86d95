"""A session on a terminal: readable at 80 columns without colours, and safe with anything in the messages."""

from __future__ import annotations

import io

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
