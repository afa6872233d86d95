"""The README's line for each command line under ``polar capture`` does what it says: in an empty home folder, at an
engine in chat mode. (OpenHands SDK's does too, but takes as long as the others together.)"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from polar.harnesses import by_name
from polar.harnesses.install import install
from tests.cli.making import REPO
from tests.harnesses.scripts import last_words, shell
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.slow]

COMMANDS = {
    "claude_code": "claude",
    "codex": "codex",
    "gemini_cli": "gemini",
    "qwen_code": "qwen",
    "opencode": "opencode",
    "pi": "pi",
    "mini_swe_agent": "mini",
}
POLAR = "import sys; sys.argv[0] = 'polar'; from polar.cli import main; main()"


def line_of(command: str) -> str:
    """The line of the README that runs this command."""
    lines = (REPO / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if "polar capture -- " in line and f" {command} " in line and "PROMPT" in line)
    return line


def put_on_path(harness: str, folder: Path) -> None:
    """The harness under its own command's name, and ``polar``."""
    install(harness)
    installed = by_name(harness).find()
    assert installed is not None
    program = shlex.quote(str(installed.executable))
    if installed.executable.name.startswith("python"):
        program += " -m minisweagent.run.mini"
    elif installed.executable.suffix == ".js":
        program = f"node {program}"
    lines = {COMMANDS[harness]: program, "polar": shlex.join([sys.executable, "-c", POLAR])}
    folder.mkdir()
    for name, run in lines.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {run} "$@"\n')
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("harness", COMMANDS)
async def test_the_line_of_the_readme_captures_a_session(harness: str, tmp_path: Path):
    put_on_path(harness, tmp_path / "bin")
    (tmp_path / "home").mkdir()
    steps = [
        Step(text=f"I make it.\n{shell(harness, 'echo hello > greeting.txt')}"),
        Step(text=last_words(harness, "It is there.")),
    ]
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    env = {**os.environ, "HOME": str(tmp_path / "home"), "PATH": path, "IS_SANDBOX": "1"}
    async with scripted_engine(make_tiny_model(tmp_path / "model"), steps, max_model_len=200_000) as engine:
        options = f"polar capture --engine openai --mode chat --engine-url {engine.url} --out out"
        line = line_of(COMMANDS[harness]).replace("PROMPT", "Make greeting.txt.").replace("polar capture", options)
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", line, cwd=tmp_path, env=env, stdin=asyncio.subprocess.DEVNULL
        )
        assert await asyncio.wait_for(process.wait(), 200) == 0
    assert (tmp_path / "greeting.txt").read_text() == "hello\n"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["completions"], report["traces"]) == ({"trained": 2}, 1)
