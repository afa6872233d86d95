"""On a terminal: the progress of a run is shown live, stays within 80 columns and is gone when the report is
there; Ctrl-C ends it in one line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.making import agent, environment, start, task, write

pytestmark = pytest.mark.slow
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a terminal of 80 columns, and all that it has written there."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.text = ""

    def read(self, until: str | None = None) -> str:
        """Until these words are on the screen; without any, to the end."""
        while until is None or until not in self.text:
            try:
                piece = os.read(self.fd, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            self.text += piece.decode(errors="replace")
        return self.text

    def press(self, keys: bytes) -> None:
        os.write(self.fd, keys)


@contextmanager
def on_terminal(args: list[str], cwd: Path) -> Iterator[tuple[Terminal, subprocess.Popen[str]]]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}

    def owns() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = start(args, cwd, env=environment(TERM="xterm"), start_new_session=True, preexec_fn=owns, **streams)
    os.close(theirs)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_progress_is_live_and_the_report_stays(here: Path, to_engine: list[str]):
    write(here, task(agent={"harness": "shell", "custom_shell": {"command": agent(2)}}, num_samples=2))
    with on_terminal(["run", "task.yaml", "--out", "out", *to_engine], here) as (terminal, process):
        text = terminal.read()
        assert process.wait(60) == 0, text
    assert "running" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor is hidden once, and back"
    plain = CODES.sub("", text)
    assert max(len(line.split("\r")[-1]) for line in plain.split("\r\n")) <= 80
    for words in ("mean reward 1", "model calls 4 trained", "2.00 calls merged", "files       out"):
        assert words in plain, plain


def test_ctrl_c_is_one_line(here: Path, to_engine: list[str]):
    write(here, task(agent={"harness": "shell", "custom_shell": {"command": "sleep 1000"}}))
    with on_terminal(["run", "task.yaml", "--out", "out", *to_engine], here) as (terminal, process):
        terminal.read(until="running")
        began = here / "out/sessions/t-0/attempt-1/agent.stdout"
        while not began.exists():
            assert process.poll() is None
        terminal.press(b"\x03")
        text = terminal.read()
        assert process.wait(60) == 130
    last = CODES.sub("", text).replace("\r\n", "\n").rstrip("\n").split("\n")[-1].split("\r")[-1]
    assert last == "polar: interrupted: run it again with --out out to go on"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")


def test_a_captured_command_handles_ctrl_c_itself(here: Path, to_engine: list[str]):
    handling = "trap 'echo bye; exit 5' INT; echo here; while :; do sleep 0.05; done"
    line = ["capture", "--out", "out", *to_engine, "--", "sh", "-c", handling]
    with on_terminal(line, here) as (terminal, process):
        terminal.read(until="here")
        terminal.press(b"\x03")
        assert "bye" in terminal.read()
        assert process.wait(60) == 5
    assert (here / "out" / "report.json").is_file()
