"""Installing and finding harnesses."""

from __future__ import annotations

import json
import re
import stat
import threading
from pathlib import Path

import pytest

from polar.contract.errors import PolarError, UsageError
from polar.harnesses import by_name, names, packages
from polar.harnesses.install import install

LOCK = Path(packages.__file__).parent / "lock"
NPM = sorted(path.parent.name for path in LOCK.glob("*/package.json"))
PYTHON = sorted(path.parent.name for path in LOCK.glob("*/requirements.txt"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Polar home with nothing in it, and a PATH with stand-ins for node and npm only."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "polar"))
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    program(tools / "node", "echo v20.20.2")
    return tmp_path


def program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def npm(home: Path) -> Path:
    """An npm that puts a package where npm would, and counts its calls."""
    package = "node_modules/@mariozechner/pi-coding-agent"
    program(
        home / "tools" / "npm",
        f'echo "$@" >> {home}/calls; while [ "$1" != --prefix ]; do shift; done; sleep 0.2\n'
        f'mkdir -p "$2/{package}/dist"; echo x > "$2/{package}/dist/cli.js"\n'
        f'echo \'{{"version": "0.73.1"}}\' > "$2/{package}/package.json"',
    )
    return home / "calls"


def test_an_install_is_found_and_shown_whole(home):
    npm(home)
    said: list[str] = []
    installed = install("pi", said.append)
    assert installed == by_name("pi").find()
    assert installed.version == by_name("pi").pinned
    assert installed.mounts[0].source == home / "polar/harnesses/pi/node_modules"
    assert "installing pi 0.73.1" in said


def test_an_install_at_hand_is_not_made_again(home):
    calls = npm(home)
    install("pi")
    install("pi")
    assert len(calls.read_text().splitlines()) == 1


def test_two_at_once_are_one(home):
    calls = npm(home)
    threads = [threading.Thread(target=install, args=("pi",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls.read_text().splitlines()) == 1
    assert by_name("pi").find() is not None


def test_a_broken_download_leaves_nothing_and_says_what_happened(home):
    program(home / "tools" / "npm", "echo 'npm error network timeout' >&2; exit 1")
    with pytest.raises(PolarError, match="npm ci failed with exit code 1: npm error network timeout"):
        install("pi")
    assert by_name("pi").find() is None
    assert [path.name for path in (home / "polar/harnesses").iterdir()] == [".pi.lock"]


@pytest.mark.parametrize("tool", ["node", "npm"])
def test_a_missing_node_says_how_to_get_one(home, monkeypatch, tool):
    npm(home)
    monkeypatch.setenv("PATH", str(home / "tools"))
    (home / "tools" / tool).unlink()
    with pytest.raises(UsageError, match=r"Node\.js 20\.6"):
        install("pi")


def test_an_old_node_says_how_to_get_another(home):
    npm(home)
    program(home / "tools" / "node", "echo v18.1.0")
    with pytest.raises(UsageError, match=r"Node\.js 20\.6"):
        install("pi")


@pytest.mark.parametrize("name", NPM)
def test_a_lock_pins_every_package_with_its_hash_and_names_no_host(name):
    lock = json.loads((LOCK / name / "package-lock.json").read_text())
    entries = {path: entry for path, entry in lock["packages"].items() if path}
    here = [entry for entry in entries.values() if "linux" in entry.get("os", ["linux"])]
    here = [entry for entry in here if "x64" in entry.get("cpu", ["x64"])]
    assert all(entry["integrity"].startswith("sha512-") for entry in here)
    assert not any("resolved" in entry for entry in entries.values())
    assert by_name(name).pinned in {entry["version"] for entry in entries.values()}
    assert (
        lock["packages"][""].items()
        >= {
            kind: wanted
            for kind, wanted in json.loads((LOCK / name / "package.json").read_text()).items()
            if kind.endswith("ependencies")
        }.items()
    )


@pytest.mark.parametrize("name", PYTHON)
def test_every_python_package_is_pinned_and_no_host_is_named(name):
    lines = (LOCK / name / "requirements.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9.-]+==[^ /:]+( ; .+)?", line) for line in lines)
    assert f"{name.replace('_', '-')}=={by_name(name).pinned}" in lines


def test_every_harness_that_is_pinned_has_a_lock():
    assert {name for name in names() if by_name(name).pinned} == {*NPM, *PYTHON}


@pytest.mark.parametrize(
    ("name", "program", "version"),
    [
        ("codex", "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex", "0.171.0-linux-x64"),
        ("claude_code", "@anthropic-ai/claude-code-linux-arm64/claude", "2.1.332"),
        ("opencode", "opencode-linux-x64/bin/opencode", "1.18.33"),
    ],
)
def test_a_native_program_is_found_in_its_platform_package_and_needs_no_node(home, name, program, version):
    (home / "tools" / "node").unlink()
    modules = home / "polar/harnesses" / name / "node_modules"
    put(modules / program, version)
    installed = by_name(name).find()
    assert installed is not None
    assert (installed.version, installed.executable) == (by_name(name).pinned, modules / program)
    assert [mount.source for mount in installed.mounts] == [modules]


@pytest.mark.parametrize("below", ["", "@openai/codex/node_modules"])
def test_a_users_own_installation_is_found_behind_its_command(home, below):
    modules = home / "own/lib/node_modules"
    put(modules / "@openai/codex/bin/codex.js", "0.170.0")
    put(modules / below / "@openai/codex-linux-x64/vendor/x/bin/codex", "0.170.0-linux-x64")
    (modules / "@openai/codex/bin/codex.js").chmod(0o755)
    (home / "tools/codex").symlink_to(modules / "@openai/codex/bin/codex.js")
    installed = by_name("codex").find()
    assert installed is not None
    assert installed.version == "0.170.0"
    assert [mount.source for mount in installed.mounts] == [modules]


def put(program: Path, version: str) -> None:
    """A program in a package of this version."""
    program.parent.mkdir(parents=True)
    program.write_text("x")
    parts = program.parts
    last = len(parts) - 1 - parts[::-1].index("node_modules")
    package = Path(*parts[: last + (3 if parts[last + 1].startswith("@") else 2)])
    (package / "package.json").write_text(json.dumps({"version": version}))


def test_a_script_needs_a_node_that_is_new_enough(home, monkeypatch):
    monkeypatch.setenv("PATH", str(home / "tools"))
    put(home / "polar/harnesses/qwen_code/node_modules/@qwen-code/qwen-code/cli-entry.js", "0.24.4")
    assert by_name("qwen_code").find() is not None
    program(home / "tools" / "node", "echo v18.20.4")
    assert by_name("qwen_code").find() is None
    with pytest.raises(UsageError, match=r"qwen_code needs Node\.js 20 or newer"):
        install("qwen_code")
    (home / "tools" / "node").unlink()
    assert by_name("qwen_code").find() is None


def test_a_python_that_is_new_enough_is_found_even_if_only_pyenv_has_it(home, monkeypatch):
    monkeypatch.setenv("PYENV_ROOT", str(home / "pyenv"))
    monkeypatch.setenv("PATH", str(home / "tools"))
    program(home / "tools" / "python3.98", "echo pyenv: python3.98: command not found >&2; exit 127")
    assert packages.find_python((3, 98)) is None
    real = home / "pyenv/versions/3.98.1/bin/python3.98"
    real.parent.mkdir(parents=True)
    program(real, f"echo 3 98 {real}")
    assert packages.find_python((3, 98)) == real


def test_without_such_a_python_it_says_how_to_get_one(home, monkeypatch):
    monkeypatch.setattr(packages, "find_python", lambda least: None)
    with pytest.raises(UsageError, match=r"openhands_sdk needs Python 3\.12 or newer"):
        install("openhands_sdk")


def test_mini_is_found_in_a_virtual_environment(home, monkeypatch):
    venv = home / "polar/harnesses/mini_swe_agent"
    (venv / "lib/python3.12/site-packages/mini_swe_agent-2.4.6.dist-info").mkdir(parents=True)
    (venv / "bin").mkdir()
    (venv / "bin/python").symlink_to("/usr/bin/env")
    installed = by_name("mini_swe_agent").find()
    assert installed is not None
    assert (installed.version, installed.executable) == ("2.4.6", venv / "bin/python")
    assert [mount.source for mount in installed.mounts] == [venv]


def test_another_program_of_that_name_is_not_taken_for_it(home):
    for name in ("pi", "mini", "codex", "claude", "gemini", "qwen", "opencode"):
        program(home / "tools" / name, "echo 3.14159")
    assert [name for name in names() if by_name(name).find() is not None] == ["shell"]


@pytest.mark.parametrize("name", names())
def test_every_harness_says_how_it_is_installed(name):
    assert by_name(name).install_hint
