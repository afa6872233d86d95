"""``polar capture``: a command keeps its stdin, its stdout and its exit code, and its model calls are kept."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polar.harnesses import by_name
from tests.cli.making import Done, ScriptedProcess, refused, run, start
from tests.e2e.oracle import Folder, check_against, check_folder, read_folder
from tests.e2e.scripts import LONG, link

pytestmark = pytest.mark.slow

SDK = """
import sys
from openai import OpenAI
client = OpenAI()
messages = []
for line in sys.stdin:
    messages.append({"role": "user", "content": line.strip()})
    stream = client.chat.completions.create(model="any", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    print(text, flush=True)
    messages.append({"role": "assistant", "content": text})
"""
PI = """
mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<END
{"providers": {"here": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "$OPENAI_API_KEY",
  "models": [{"id": "m", "contextWindow": 32000, "maxTokens": 4000, "reasoning": false}]}}}
END
exec %s -p --provider here --model m "$1" < /dev/null
"""


def capture(here: Path, to_engine: list[str], *command: str, input: str | None = None, report: bool = False) -> Done:
    options = ["--report", "-"] if report else []
    return run(["capture", "--out", "out", *options, *to_engine, "--", *command], here, input=input)


def checked(here: Path, engine: ScriptedProcess) -> Folder:
    folder = read_folder(here / "out")
    check_folder(folder)
    known = {completion.completion_id for completion in folder.completions}
    generations = [each for each in engine.generations() if each["request_id"] in known]
    check_against(generations, folder.completions, folder.results.values())
    return folder


def test_a_script_on_the_openai_sdk(engine: ScriptedProcess, to_engine: list[str], tmp_path: Path):
    done = capture(tmp_path, to_engine, sys.executable, "-c", SDK, input="one\ntwo\nthree\n", report=True)
    assert (done.code, done.out) == (0, "reply 0\nreply 1\nreply 2\n")
    report = json.loads(done.err)
    assert report.pop("folder") == "out"
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert (report["traces"], report["merge_factor"]) == (1, 3.0)
    folder = checked(tmp_path, engine)
    (result,) = folder.results.values()
    assert (result.status, result.trajectory.traces[0].reward) == ("COMPLETED", None)
    messages = [*result.trajectory.traces[0].prompt_messages, *result.trajectory.traces[0].response_messages]
    assert [each.content for each in messages] == ["one", "reply 0", "two", "reply 1", "three", "reply 2"]


@pytest.mark.real
def test_pi_itself(harnesses: None, engine: ScriptedProcess, to_engine: list[str], tmp_path: Path):
    installed = by_name("pi").find()
    assert installed is not None
    script = (
        f"export HOME={shlex.quote(str(tmp_path))} PI_OFFLINE=1 PI_TELEMETRY=0\n"
        + PI % f"node {installed.executable}"
    )
    done = capture(tmp_path, to_engine, "sh", "-c", script, "sh", f"Do the work of {link('pi-long', 0)} now.")
    assert (done.code, done.out.strip()) == (0, "All of it is done."), done
    folder = checked(tmp_path, engine)
    (result,) = folder.results.values()
    assert (result.status, len(result.trajectory.traces)) == ("COMPLETED", 1)
    assert result.trajectory.metadata["merge_factor"] == len(LONG) + 1


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 3", 3), ("kill -TERM $$", 128 + signal.SIGTERM), ("kill -KILL $$", 128 + signal.SIGKILL)],
)
def test_how_the_command_ends_is_how_it_ends(to_engine: list[str], tmp_path: Path, command: str, code: int):
    done = capture(tmp_path, to_engine, "sh", "-c", f"echo out; echo err >&2; {command}")
    assert (done.code, done.out) == (code, "out\n")
    said = r"err\npolar: no model call: [^\n]*OPENAI_BASE_URL[^\n]*\npolar: 0 calls, 0 traces in out\n"
    assert re.fullmatch(said, done.err), done.err
    check_folder(read_folder(tmp_path / "out"))


def test_a_command_that_was_refused_by_the_gateway_is_told_so(to_engine: list[str], tmp_path: Path):
    refused_twice = (
        "import os, urllib.error, urllib.request as r\n"
        "for body in (b'{}', b'no JSON'):\n"
        "    head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "    try: r.urlopen(r.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, head))\n"
        "    except urllib.error.HTTPError as error: print(error.code)\n"
    )
    done = capture(tmp_path, to_engine, sys.executable, "-c", refused_twice)
    assert (done.code, done.out) == (0, "400\n400\n")
    said, last = done.err.splitlines()
    assert said.startswith("polar: no model call: all 2 calls were refused, the last one: ")
    assert "BASE_URL" not in said
    assert last == "polar: 0 calls, 0 traces in out"
    (result,) = read_folder(tmp_path / "out").results.values()
    assert (result.status, f"polar: {result.error}") == ("ERROR", said)


def test_a_command_that_failed_keeps_its_calls(engine: ScriptedProcess, to_engine: list[str], tmp_path: Path):
    failing = SDK + "sys.exit(7)"
    done = capture(tmp_path, to_engine, sys.executable, "-c", failing, input="one\n")
    assert (done.code, done.out) == (7, "reply 0\n")
    warning, last = done.err.splitlines()
    assert warning.startswith("polar: warning: temperature, top_p, top_k are left to the engine")
    assert last == "polar: 1 call, 1 trace in out"
    (result,) = checked(tmp_path, engine).results.values()
    assert (result.status, len(result.trajectory.traces)) == ("ERROR", 1)
    assert "exit code 7" in str(result.error)


def test_stdin_and_stdout_are_the_command_s_own(to_engine: list[str], tmp_path: Path):
    done = capture(tmp_path, to_engine, "cat", input="naïve 東京\n\x1b[31m no line end")
    assert (done.code, done.out) == (0, "naïve 東京\n\x1b[31m no line end")


def test_options_of_the_command_are_not_ours(to_engine: list[str], tmp_path: Path):
    assert capture(tmp_path, to_engine, "echo", "--help", "--engine", "x").out == "--help --engine x\n"


def test_a_command_that_is_not_there_makes_nothing(to_engine: list[str], tmp_path: Path):
    assert refused(capture(tmp_path, to_engine, "no-such-command", "-x"), 127, "no-such-command", "not found")
    assert refused(run(["capture", "--engine", "nonsense", "--out", "out", "true"], tmp_path), 2, "nonsense")
    assert refused(run(["capture", "--report", "file", "--out", "out", "true"], tmp_path), 2, "--report")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o755, "#!/no/such/python3\nprint()\n", ["'/no/such/python3' is not there"]),
        (0o755, "#! /bin/sh\r\necho\r\n", ["'/bin/sh\\r' is not there"]),
        (0o755, "echo hello\n", ["#! line", "interpreter"]),
        (0o755, "", ["#! line"]),
        (0o644, "#!/bin/sh\necho\n", ["not executable", "chmod"]),
    ],
)
def test_a_script_that_can_not_be_started_makes_nothing(
    to_engine: list[str], tmp_path: Path, mode: int, text: str, words: list[str]
):
    script = tmp_path / "agent"
    script.write_bytes(text.encode())
    script.chmod(mode)
    assert refused(capture(tmp_path, to_engine, "./agent"), 126, "./agent", *words)
    assert list(tmp_path.iterdir()) == [script]


def test_a_signal_is_the_command_s_to_handle(to_engine: list[str], tmp_path: Path):
    handling = "trap 'echo bye; exit 42' TERM; echo here; while :; do sleep 0.05; done"
    with start(["capture", "--out", "out", *to_engine, "--", "sh", "-c", handling], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.terminate()
        out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (42, "bye\n")
    check_folder(read_folder(tmp_path / "out"))


def test_a_capture_that_was_killed_has_ended_when_the_folder_is_used_again(
    engine: ScriptedProcess, to_engine: list[str], tmp_path: Path
):
    line = ["capture", "--out", "out", *to_engine, "--", sys.executable, "-c", SDK]
    with start(line, tmp_path, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("one\n")
        process.stdin.flush()
        assert process.stdout.readline() == "reply 0\n"
        process.kill()
        process.communicate()
    assert capture(tmp_path, to_engine, sys.executable, "-c", SDK, input="one\ntwo\n").code == 0
    killed, whole = sorted(checked(tmp_path, engine).results.values(), key=lambda each: each.session_id)
    assert (killed.status, len(killed.trajectory.traces)) == ("ERROR", 1)
    assert "cut off" in str(killed.error)
    assert (whole.status, whole.trajectory.metadata["merge_factor"]) == ("COMPLETED", 2)
