"""Outputs as the programs leave them, and what they mean: exit codes alone are not believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polar.contract.runtime import ExecResult
from polar.harnesses import by_name


def result(folder: Path, exit_code: int, stdout: str = "", stderr: str = "") -> ExecResult:
    (folder / "out").write_text(stdout)
    (folder / "err").write_text(stderr)
    return ExecResult(exit_code, False, folder / "out", folder / "err")


def pi_run(stop: str | None, error: str | None = None) -> str:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}
    answer |= {"stopReason": stop} if stop else {}
    answer |= {"errorMessage": error} if error else {}
    events = [
        {"type": "agent_start"},
        {"type": "turn_start"},
        {"type": "message_start", "message": {"role": "user"}},
        {"type": "message_end", "message": {"role": "user"}},
        {"type": "message_start", "message": answer},
        {"type": "message_end", "message": answer},
        {"type": "turn_end", "message": answer, "toolResults": []},
        {"type": "agent_end", "messages": [{"role": "user"}, answer]},
    ]
    return "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)


SESSION = '{"type":"session","version":3}\n'
RETRY = '{"type":"auto_retry_start","attempt":1,"maxAttempts":3,"delayMs":2000,"errorMessage":"Connection error."}\n'
GAVE_UP = '{"type":"auto_retry_end","success":false,"attempt":3,"finalError":"Connection error."}\n'


@pytest.mark.parametrize("stop", ["stop", "length"])
def test_pi_that_answered_is_fine(tmp_path, stop):
    assert by_name("pi").judge(result(tmp_path, 0, SESSION + pi_run(stop))) is None


def test_pi_that_recovered_from_an_error_is_fine(tmp_path):
    output = SESSION + pi_run("error", "Connection error.") + RETRY + pi_run("stop")
    assert by_name("pi").judge(result(tmp_path, 0, output)) is None


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (SESSION + pi_run("error", "401 nope"), "401 nope"),
        (SESSION + pi_run("error", "Connection error.") + GAVE_UP, "Connection error"),
        (SESSION + pi_run("aborted"), "aborted"),
        (SESSION + pi_run("toolUse"), "toolUse"),
        (SESSION + pi_run(None), "stopReason None"),
        (SESSION + pi_run("stop").rpartition('{"type":"agent_end"')[0], "ends before"),
        (SESSION + pi_run("stop")[:-30], "ends before"),
        (SESSION + pi_run("error", "x") + RETRY + '{"type":"agent_start"}\n', "ends before"),
        (SESSION, "ends before"),
        ("", "it said nothing"),
    ],
)
def test_pi_with_exit_code_0_and_no_answer_failed(tmp_path, output, words):
    assert words in str(by_name("pi").judge(result(tmp_path, 0, output)))


def test_pi_that_crashed_failed_with_its_last_words(tmp_path):
    said = by_name("pi").judge(result(tmp_path, 1, SESSION + pi_run("stop"), "Error: Cannot find module 'x'"))
    assert "exit code 1" in str(said)
    assert "Cannot find module" in str(said)


@pytest.mark.parametrize(
    ("exit_code", "status"),
    [(0, "Submitted"), (3, "RepeatedFormatError"), (3, "LimitsExceeded")],
)
def test_mini_that_came_to_an_end_in_order_is_fine(tmp_path, exit_code, status):
    output = f"lots of output\n\npolar: mini-swe-agent ended as {status}\n"
    assert by_name("mini_swe_agent").judge(result(tmp_path, exit_code, output)) is None


@pytest.mark.parametrize(
    ("exit_code", "output", "words"),
    [
        (1, "╭─ box ─╮\nAuthenticationError: nope\n", "exit code 1: box AuthenticationError: nope"),
        (0, "Saved trajectory\n", "exit code 0"),
        (3, "\npolar: mini-swe-agent ended as nothing\n", "ended as nothing"),
        (3, "\npolar: mini-swe-agent ended as UserInterruption\n", "UserInterruption"),
        (-9, "polar: mini-swe-agent ended as Submitted\n", "exit code -9"),
    ],
)
def test_mini_that_broke_failed(tmp_path, exit_code, output, words):
    assert words in str(by_name("mini_swe_agent").judge(result(tmp_path, exit_code, output)))


def test_a_shell_is_judged_by_its_exit_code(tmp_path):
    assert by_name("shell").judge(result(tmp_path, 0)) is None
    assert "exit code 5: broken" in str(by_name("shell").judge(result(tmp_path, 5, stderr="broken\n")))
