"""What a call asked for and did not get is told, without anybody asking for a log; and where the record of it is."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from tests.cli.making import Forked, ScriptedProcess, refused, task, write

FORCING = """
import json, os, sys, urllib.request
tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
for turn in range(2):
    asked = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    asked |= {"tools": [tool], "tool_choice": "required"}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(asked).encode(), headers)).read()
print("done")
print("own words", file=sys.stderr)
"""
DROPPED = "tool_choice 'required' was dropped: with token ids nothing can make the model call a tool"


@pytest.fixture
def to_tokens(engine: ScriptedProcess) -> list[str]:
    """The options that name the scripted engine as one that takes token ids."""
    return ["--engine", "vllm", "--mode", "tito", "--engine-url", engine.url]


def test_a_capture_tells_of_what_was_dropped_and_where_it_is(polar: Forked, here: Path, to_tokens: list[str]):
    done = polar(["capture", *to_tokens, "--", sys.executable, "-c", FORCING], here)
    (folder,) = (here / "results").iterdir()
    assert (done.code, done.out) == (0, "done\n")
    last = f"polar: 2 calls, 2 traces in results/{folder.name}"
    assert done.err.splitlines()[-3:] == ["own words", f"polar: warning: {DROPPED}", last]
    assert json.loads((folder / "report.json").read_text())["warnings"] == {DROPPED: 1}
    (result,) = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    assert result["trajectory"]["metadata"]["warnings"] == [DROPPED]
    shown = " ".join(polar(["show", folder], here, COLUMNS="80").out.split())
    assert f"warning: {DROPPED}" in shown


def test_a_run_tells_of_it_once_with_how_many_sessions_it_concerns(polar: Forked, here: Path, to_tokens: list[str]):
    agent = {"harness": "shell", "custom_shell": {"command": f"python3 -c {shlex.quote(FORCING)}"}}
    write(here, task(agent=agent, num_samples=2))
    done = polar(["run", "task.yaml", "--out", "out", *to_tokens], here, COLUMNS="80")
    assert done.code == 0, done
    said = " ".join((done.out + done.err).split())
    assert said.count("was dropped") == 1
    assert f"2 x {DROPPED}" in said
    assert json.loads((here / "out" / "report.json").read_text())["warnings"] == {DROPPED: 2}


def test_a_test_command_that_was_not_found_is_told_of(polar: Forked, here: Path, to_tokens: list[str]):
    evaluator = {"strategy": "test_on_output", "config": {"test_command": "no-such-tool"}}
    write(here, task(evaluator=evaluator, num_samples=2))
    done = polar(["run", "task.yaml", "--out", "out", *to_tokens], here)
    line = "test_command ended with 127: it, or a command in it, was not found (see evaluation.stderr)"
    assert (done.code, f"warning     2 x {line}\n" in done.out) == (0, True), done
    assert json.loads((here / "out" / "report.json").read_text())["warnings"][line] == 2
    shown = polar(["show", "out", "t-0"], here).out
    assert (f"warning: {line}\n" in shown, "reward 0, exit code 127: " in shown) == (True, True), shown


def test_a_captured_command_that_does_not_exist_is_one_line_and_no_folder(
    polar: Forked, here: Path, to_tokens: list[str]
):
    assert refused(polar(["capture", *to_tokens, "--", "no-such-command"], here), 127, "no-such-command", "not found")
    assert list(here.iterdir()) == []
