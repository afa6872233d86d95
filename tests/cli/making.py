"""What tests of the command line share: commands, task files, a scripted engine in a process of its own, and
an agent that can be told when to break."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tests.support.script import Step

REPO = Path(__file__).parents[2]
POLAR = [sys.executable, "-c", "import sys; sys.argv[0] = 'polar'; from polar.cli import main; main()"]


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment for a command that nobody watches on a terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "POLAR_LOG")}
    return {**kept, **changes}


def start(args: Sequence[str | Path], cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """``polar ARGS`` as a process of its own; its output goes to pipes unless ``options`` says otherwise."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    options = {"env": environment(), "text": True, **options}
    return subprocess.Popen([*POLAR, *map(str, args)], cwd=cwd, **options)


def run(
    args: Sequence[str | Path], cwd: Path, *, timeout: float = 300, input: str | None = None, **options: Any
) -> Done:
    """``polar ARGS`` to its end."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(args, cwd, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


class Forked:
    """Commands forked from one process that has the command line imported already."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cli.forking"],
            cwd=REPO,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, args: Sequence[str | Path], cwd: Path, *, input: str = "", **changes: str) -> Done:
        """``polar ARGS`` to its end, with ``changes`` to the environment."""
        files = [self._scratch / name for name in ("in", "out", "err")]
        files[0].write_text(input)
        for path in files[1:]:
            path.write_text("")
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd),
            "env": environment(**changes),
            "files": [str(path) for path in files],
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return Done(code, files[1].read_text(), files[2].read_text())

    def close(self) -> None:
        self._process.communicate()


# ---- engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScriptedProcess:
    """A scripted engine in a process of its own, and the log that it writes."""

    url: str
    log: Path
    process: subprocess.Popen[str]

    def kill(self) -> None:
        self.process.kill()

    def generations(self) -> list[dict[str, Any]]:
        """Every generation so far, in order of its start."""
        with urllib.request.urlopen(f"{self.url}/scripted/log") as reply:
            found: list[dict[str, Any]] = json.load(reply)
        return found


@contextmanager
def scripted_process(model: Path, steps: Sequence[Step], folder: Path) -> Iterator[ScriptedProcess]:
    """A scripted engine on loopback until the block ends; its script and log are in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    script, log = folder / "script.json", folder / "engine.jsonl"
    script.write_bytes(msgspec.json.encode(list(steps)))
    line = [sys.executable, "-m", "tests.support.scripted", "--model-dir", str(model)]
    with (folder / "engine.err").open("wb") as errors:
        process = subprocess.Popen(
            [*line, "--script", str(script), "--log", str(log)],
            cwd=REPO,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, (folder / "engine.err").read_text()
        yield ScriptedProcess(url, log, process)
    finally:
        process.kill()
        process.communicate()


def bash(command: str) -> str:
    """What a model writes to call the tool ``bash``, in the tiny model's own form."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


# ---- tasks -----------------------------------------------------------------------------------------------

AGENT = r"""
import json, os, signal, sys, time, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(int(sys.argv[2])):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    with urllib.request.urlopen(urllib.request.Request(base + "/chat/completions", body, headers)) as reply:
        got = json.load(reply)
    text = got["choices"][0]["message"]["content"]
    with open(os.environ.get("RECEIVED") or "received.txt", "a") as file:
        file.write(json.dumps([os.environ["SESSION_ID"], got["id"], text]) + "\n")
    print(json.dumps([got["id"], text]), flush=True)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on " + str(turn + 1)}]
"""
"""A whole agent: an instruction, a number of turns, and a line for every reply that it has received, on stdout
and in a file."""


def agent(turns: int, then: str = "") -> str:
    """The shell command of ``AGENT`` with this many turns; ``then`` is more shell."""
    return f"python3 -c {shlex.quote(AGENT)} {{{{INSTRUCTION}}}} {turns}{then}"


def task(task_id: str = "t", **changes: Any) -> dict[str, Any]:
    """A task of one turn for the scripted engine."""
    shell = {"harness": "shell", "custom_shell": {"command": agent(1)}}
    return {"task_id": task_id, "instruction": "say hello", "agent": shell, **changes}


def write(folder: Path, body: Any, name: str = "task.yaml") -> Path:
    """A task file."""
    path = folder / name
    path.write_text(body if isinstance(body, str) else yaml.safe_dump(body))
    return path


# ---- what is looked at -----------------------------------------------------------------------------------


def refused(done: Done, code: int, *words: str) -> bool:
    """One line on stderr that begins with the program's name and has these words; nothing on stdout.

    True; where it is otherwise, an assertion in here says what is.
    """
    assert done.out == "", done
    assert done.err.endswith("\n"), done
    assert done.err.count("\n") == 1, done
    assert done.err.startswith("polar: "), done
    assert done.code == code, done
    missing = [word for word in words if word not in done.err]
    assert not missing, (missing, done.err)
    return True
