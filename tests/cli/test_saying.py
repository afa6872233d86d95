"""What the program says of itself and of this host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

import polar as package
from polar.cli.screen import Table
from tests.cli.making import Forked, ScriptedProcess, environment, run

COMMANDS = ("demo", "capture", "run", "show", "export", "doctor")


def test_version_and_help_in_a_process_of_their_own(tmp_path: Path):
    done = run(["--version"], tmp_path)
    assert (done.code, done.out, done.err) == (0, f"polar {package.__version__}\n", "")
    done = run(["--help"], tmp_path, env=environment(TERM="dumb", COLUMNS="80"))
    assert (done.code, done.err) == (0, "")
    assert all(f"\n  {name} " in done.out for name in COMMANDS), done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(polar: Forked, tmp_path: Path, command: str):
    done = polar([command, "--help"], tmp_path, COLUMNS="80")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: polar {command}")


def test_a_table_is_as_wide_as_the_terminal_and_ends_no_line_in_blanks():
    table = Table("session", "error")
    table.add_row("s-0", "many words " * 40)
    table.add_row("s-1", Text("none", style="bold"))
    for width in (80, 1_000_000):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        lines = capture.get().splitlines()
        assert lines[0] == "session  error"
        assert lines[-1] == "s-1      none"
        assert max(map(len, lines)) <= width
        assert not [line for line in lines if line.endswith(" ")]
    assert len(lines) == 3, "nothing is wrapped where there is room"


def test_no_command_is_answered_with_help(polar: Forked, tmp_path: Path):
    done = polar([], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: polar")


def test_doctor_says_what_works_here_and_how_to_mend_the_rest(polar: Forked, tmp_path: Path):
    nothing = {"POLAR_HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin"}
    done = polar(["doctor", "--json"], tmp_path, **nothing)
    assert (done.code, done.err) == (0, "")
    checks = {check["what"]: check for check in done.json}
    assert {"polar", "sandbox", "embedded engine", "harness pi", "harness mini_swe_agent"} <= set(checks)
    assert checks["polar"]["ok"]
    missing = checks["harness mini_swe_agent"]
    assert not missing["ok"]
    assert "polar doctor --fix mini_swe_agent" in missing["fix"]
    text = polar(["doctor"], tmp_path, COLUMNS="80", **nothing).out
    assert "polar doctor --fix mini_swe_agent" in " ".join(text.split())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def pi_here(installed_pi: dict[str, str], tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A host of its own where pi is installed, by its looks."""
    home = tmp_path / "polar"
    shutil.copytree(installed_pi["POLAR_HOME"], home)
    return home, {"POLAR_HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin"}


def test_a_harness_of_another_version_is_said(polar: Forked, here: Path, pi_here: tuple[Path, dict[str, str]]):
    home, host = pi_here
    (package_json,) = home.glob("harnesses/pi/**/package.json")
    package_json.write_text('{"version": "0.72.9"}')
    checks = {check["what"]: check for check in polar(["doctor", "--json"], here, **host).json}
    pi = checks["harness pi"]
    assert (pi["ok"], pi["detail"], pi["fix"]) == (True, "0.72.9, tested with 0.73.1", "polar doctor --fix pi")
    (here / "task.json").write_text('{"task_id": "t", "instruction": "x", "agent": {"harness": "pi"}}')
    line = ["run", "task.json", "--engine", "openai", "--engine-url", "http://127.0.0.1:1"]
    said = polar(line, here, **host).err.splitlines()
    assert "harness pi is version 0.72.9, and 0.73.1 is the one that was tested: polar doctor --fix pi" in said[0]


def test_a_node_that_is_too_old_is_said(polar: Forked, here: Path, pi_here: tuple[Path, dict[str, str]]):
    home, host = pi_here
    (home / "bin/node").write_text("#!/bin/sh\necho v18.20.4\n")
    (home / "bin/npm").write_text("#!/bin/sh\n")
    (home / "bin/npm").chmod(0o755)
    checks = {check["what"]: check for check in polar(["doctor", "--json"], here, **host).json}
    assert (checks["harness pi"]["ok"], checks["harness pi"]["fix"]) == (False, "polar doctor --fix pi")
    done = polar(["doctor", "--fix", "pi"], here, **host)
    assert (done.code, "polar: pi needs Node.js 20.6 or newer" in done.err) == (2, True)


def test_doctor_asks_an_engine(polar: Forked, tmp_path: Path, engine: ScriptedProcess):
    done = polar(["doctor", "--json", "--engine-url", engine.url], tmp_path)
    found = json.loads(done.out)[-1]
    assert (done.code, found["ok"], "scripted" in found["detail"]) == (0, True, True)
    done = polar(["doctor", "--json", "--engine-url", f"{engine.url}/scripted/log"], tmp_path)
    assert (done.code, json.loads(done.out)[-1]["ok"]) == (1, False)
