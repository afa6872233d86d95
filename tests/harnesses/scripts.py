"""What the scripted model says to each harness: calls of the tools that it has, and whole conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.support.script import Script, Step

SHELL_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "codex": ("exec_command", {"cmd": ""}),
    "claude_code": ("Bash", {"description": "do it", "timeout": 60000.0, "command": ""}),
    "gemini_cli": ("run_shell_command", {"command": "", "description": "do it"}),
    "qwen_code": ("run_shell_command", {"command": "", "is_background": False, "description": "do it"}),
    "opencode": ("bash", {"description": "do it", "timeout": 60000.0, "command": ""}),
    "pi": ("bash", {"timeout": 60.0, "command": ""}),
    "mini_swe_agent": ("bash", {"command": ""}),
    "openhands_sdk": ("terminal", {"command": "", "security_risk": "LOW", "summary": "do it"}),
}
"""With arguments that harnesses write otherwise when they send them back: numbers, and keys out of order."""
DIALECTS = {"codex": "openai_responses", "claude_code": "anthropic", "gemini_cli": "gemini"}
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def shell(harness: str, command: str) -> str:
    """A call of the harness's own shell tool."""
    name, arguments = SHELL_TOOLS[harness]
    return call(name, {key: command if key in ("cmd", "command") else value for key, value in arguments.items()})


def thinking(thought: str, rest: str) -> str:
    """A reply after a thought."""
    return f"<think>\n{thought}\n</think>\n\n{rest}"


def last_words(harness: str, text: str) -> str:
    """The model's last reply; mini ends only by a call."""
    return f"{text}\n{shell(harness, SUBMIT)}" if harness == "mini_swe_agent" else text


def in_order(steps: Sequence[Step]) -> Script:
    """One step for each call, whatever it asks."""
    left = iter(steps)
    return Script(choose=lambda _: next(left))


# ---- twenty turns ------------------------------------------------------------------------------------------

TWENTY = "Write twenty lines into lines.txt, one at a time."
TWENTY_THERE = "test $(grep -c '^line' lines.txt) = 20"


def twenty_turns(harness: str) -> list[Step]:
    """Twenty calls with thinking, now and then with words before them, and an answer."""
    commands = [_line(turn) for turn in range(20)]
    words = ["", "Next, “naïve” 東京.\n\n", "  On:\n"]
    steps = [
        Step(text=thinking(f"Turn {turn}: what next?", words[turn % 3] + shell(harness, command)), chunk_tokens=3)
        for turn, command in enumerate(commands)
    ]
    return [*steps, Step(text=thinking("All there.", last_words(harness, "All of it is done.")))]


def _line(turn: int) -> str:
    """A command that is not simply itself as JSON, or prints what must not be read as the model's own marks."""
    return (
        f"echo 'line {turn} of \"many\", naïve 東京' >> lines.txt",
        f"cat >> lines.txt <<'END'\nline {turn}\twith a tab and a \\ backslash\nEND\ntail -n 1 lines.txt",
        f'python3 -c \'print("line {turn}", {{"a": [1.0, None]}})\' | tee -a lines.txt',
        f"printf 'line {turn} <|im_%s|> </tool_%s>\\n' end call | tee -a lines.txt; ls no-{turn}; wc -l lines.txt",
    )[turn % 4]
