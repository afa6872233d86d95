"""Installing and finding harnesses."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from polar.contract.errors import PolarError, UsageError
from polar.harnesses import by_name, names
from polar.harnesses import install as installing
from polar.harnesses.install import install

LOCK = Path(installing.__file__).parent / "lock" / "pi"


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


def test_the_lock_pins_every_package_with_its_hash_and_names_no_host():
    lock = json.loads((LOCK / "package-lock.json").read_text())
    packages = {path: entry for path, entry in lock["packages"].items() if path}
    assert packages["node_modules/@mariozechner/pi-coding-agent"]["version"] == by_name("pi").pinned
    assert all(entry["integrity"].startswith("sha512-") for entry in packages.values())
    assert not any("resolved" in entry for entry in packages.values())


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
    for name in ("pi", "mini"):
        program(home / "tools" / name, "echo 3.14159")
    assert by_name("pi").find() is None
    assert by_name("mini_swe_agent").find() is None


@pytest.mark.parametrize("name", names())
def test_every_harness_says_how_it_is_installed(name):
    assert by_name(name).install_hint
