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


# ---- as the real programs said it at a scripted model, cut to what matters ----------------------------------


def lines(*events: dict[str, object]) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def claude(**end: object) -> dict[str, object]:
    return {"type": "result", "subtype": "success", "is_error": False, "num_turns": 3, "result": "It is done."} | end


def qwen(**end: object) -> dict[str, object]:
    return {"type": "result", "subtype": "success", "is_error": False, "num_turns": 3, "result": "It is done."} | end


def opencode(kind: str, reason: str | None = None) -> dict[str, object]:
    return {"type": kind, "sessionID": "ses_1", "part": {"id": "prt_1"} | ({"reason": reason} if reason else {})}


INIT = {"type": "system", "subtype": "init", "session_id": "s"}
TURN = {"type": "turn.started"}
MESSAGE = {"type": "item.completed", "item": {"id": "item_5", "type": "agent_message", "text": "It is done."}}
UNKNOWN = {
    "type": "item.completed",
    "item": {"id": "item_0", "type": "error", "message": "Model metadata not found."},
}
DONE = {"type": "turn.completed", "usage": {"input_tokens": 68635, "output_tokens": 107}}
API_ERROR = {
    "type": "error",
    "error": {"name": "APIError", "data": {"message": "scripted bad request", "statusCode": 400}},
}
GEMINI = {"type": "init", "session_id": "s", "model": "some/model"}
EMPTY = {"type": "error", "severity": "error", "message": "The model returned an empty response with no text."}
REFUSED = {"type": "unknown", "message": '[API Error: {"error":{"code":400,"message":"scripted bad request"}}]'}


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("claude_code", lines(INIT, claude())),
        ("claude_code", lines(INIT, claude(), {"type": "system", "subtype": "bye"})),
        ("claude_code", lines(INIT, claude(result=""))),
        ("codex", lines(UNKNOWN, TURN, MESSAGE, DONE)),
        ("codex", lines(TURN, {"type": "error", "message": "Reconnecting... 1/5"}, MESSAGE, DONE)),
        ("qwen_code", lines(INIT, qwen())),
        ("gemini_cli", lines(GEMINI, {"type": "result", "status": "success", "stats": {"tool_calls": 2}})),
        ("opencode", lines(opencode("step_start"), opencode("text"), opencode("step_finish", "stop"))),
        ("opencode", lines(opencode("step_start"), opencode("text"), opencode("step_finish", "length"))),
        ("openhands_sdk", "Message from Agent\n\npolar: openhands ended as finished\n"),
        ("openhands_sdk", "\npolar: openhands ended as stuck\n"),
    ],
)
def test_a_program_that_came_to_its_end_is_fine(tmp_path, name, output):
    assert by_name(name).judge(result(tmp_path, 0, output)) is None


@pytest.mark.parametrize(
    ("name", "exit_code", "output", "words"),
    [
        ("claude_code", 1, lines(INIT, claude(is_error=True, result="API Error: 400 nope")), "API Error: 400 nope"),
        ("claude_code", 0, lines(INIT, claude(is_error=True, result="Too long")), "could not go on: Too long"),
        (
            "claude_code",
            1,
            lines(INIT, claude(subtype="error_max_turns", result=None, errors=["boom"])),
            "boom",
        ),
        ("claude_code", 0, lines(INIT), "no result"),
        ("claude_code", 143, lines(INIT, claude()), "exit code 143"),
        ("codex", 1, lines(TURN, {"type": "turn.failed", "error": {"message": "status 502"}}), "status 502"),
        ("codex", 0, lines(TURN, {"type": "turn.failed", "error": {"message": "status 502"}}), "status 502"),
        ("codex", 0, lines(TURN, MESSAGE), "before its turn does"),
        ("codex", 0, lines(TURN, DONE, TURN), "before its turn does"),
        ("codex", -9, lines(TURN, DONE), "exit code -9"),
        ("codex", 1, "", "it said nothing"),
        (
            "qwen_code",
            1,
            lines(qwen(subtype="error_during_execution", is_error=True, error={"message": "[API Error: 400 nope]"})),
            "[API Error: 400 nope]",
        ),
        ("qwen_code", 0, lines(INIT), "no result"),
        ("qwen_code", 1, lines(qwen()), "exit code 1"),
        ("gemini_cli", 144, lines(GEMINI, {"type": "result", "status": "error", "error": REFUSED}), "bad request"),
        ("gemini_cli", 0, lines(GEMINI, EMPTY, {"type": "result", "status": "error"}), "empty response"),
        ("gemini_cli", 0, lines(GEMINI), "no result"),
        ("gemini_cli", 1, lines(GEMINI, {"type": "result", "status": "success"}), "exit code 1"),
        ("opencode", 1, lines(API_ERROR), "scripted bad request"),
        ("opencode", 0, lines(opencode("step_start"), API_ERROR), "scripted bad request"),
        ("opencode", 0, lines(opencode("step_start"), opencode("step_finish", "tool-calls")), "last answer"),
        ("opencode", 0, lines(opencode("step_start"), opencode("text")), "last answer"),
        ("opencode", -15, lines(opencode("step_start"), opencode("step_finish", "stop")), "exit code -15"),
        ("openhands_sdk", 1, "\npolar: openhands ended as ConversationRunError: 502\n", "ConversationRunError: 502"),
        ("openhands_sdk", 0, "\npolar: openhands ended as error\n", "error"),
        ("openhands_sdk", 1, "Traceback\nModuleNotFoundError: openhands\n", "ModuleNotFoundError"),
    ],
)
def test_a_program_that_did_not_failed_whatever_its_exit_code(tmp_path, name, exit_code, output, words):
    said = by_name(name).judge(result(tmp_path, exit_code, output))
    assert said is not None
    assert said.startswith(name)
    assert words in said


BEARS = {"type": "polar.mcp_servers", "names": ["bears"]}
GEMINI_END = {"type": "result", "status": "success"}


def init(**servers: str) -> dict[str, object]:
    return INIT | {"mcp_servers": [{"name": name, "status": status} for name, status in servers.items()]}


@pytest.mark.parametrize(
    ("name", "output", "stderr"),
    [
        ("claude_code", lines(BEARS, init(bears="failed"), claude()), ""),
        ("claude_code", lines(BEARS, init(bears="needs-auth"), claude()), ""),
        ("qwen_code", lines(BEARS, init(bears="disconnected"), qwen()), ""),
        ("gemini_cli", lines(BEARS, GEMINI_END), "[ERROR] Error during discovery for MCP server 'bears': gone\n"),
        (
            "opencode",
            lines(BEARS, opencode("step_finish", "stop")),
            'message="server unavailable" key=bears status=failed',
        ),
        ("openhands_sdk", "\npolar: openhands ended as without its MCP server bears\n", ""),
    ],
)
def test_a_program_that_went_on_without_a_server_of_the_task_failed(tmp_path, name, output, stderr):
    said = str(by_name(name).judge(result(tmp_path, 0, output, stderr)))
    assert said.startswith(name)
    assert "MCP server bears" in said


@pytest.mark.parametrize(
    ("name", "output", "stderr"),
    [
        ("claude_code", lines(BEARS, init(bears="connected", theirs="failed"), claude()), ""),
        ("claude_code", lines(BEARS, init(bears="pending"), claude()), ""),
        ("qwen_code", lines(init(theirs="disconnected"), qwen()), ""),
        ("gemini_cli", lines(BEARS, GEMINI_END), "MCP issues detected. Run /mcp list for status.\n"),
        ("opencode", lines(BEARS, opencode("step_finish", "stop")), 'message="server unavailable" key=theirs'),
    ],
)
def test_a_server_that_the_workspace_brought_is_not_asked_for(tmp_path, name, output, stderr):
    assert by_name(name).judge(result(tmp_path, 0, output, stderr)) is None


@pytest.mark.parametrize("options", ["  -h, --help  Show help  [boolean]\n", "  --help  show\n  --auto  approve\n"])
def test_a_program_that_printed_its_help_says_first_why(tmp_path, options):
    help_text = "Unknown argument: frob\nUsage: gemini [options]\n" + "  --raw  as it is\n" * 400 + options
    said = str(by_name("gemini_cli").judge(result(tmp_path, 1, "", help_text)))
    assert "Unknown argument: frob ... " in said
    assert len(said) < 300


def test_the_end_is_found_behind_a_line_that_is_very_long(tmp_path):
    output = lines(INIT, {"type": "user", "text": "x" * (1 << 20)}, claude())
    assert by_name("claude_code").judge(result(tmp_path, 0, output)) is None
