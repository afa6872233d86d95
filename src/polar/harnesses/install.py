"""Put a harness's pinned version under ``$POLAR_HOME/harnesses``: all of it or nothing, and never twice.

It is built in a folder beside its place and moved there in one step, so a broken download leaves nothing that
looks installed. Of two installers at once the second waits, and finds it done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from polar.contract.errors import PolarError, UsageError
from polar.harnesses import by_name
from polar.harnesses.base import Harness, Installed
from polar.harnesses.found import harness_folder

Progress = Callable[[str], None]
NODE = "pi needs Node.js 20.6 or newer with npm: apt-get install nodejs npm, or nvm install 20"


def install(name: str, progress: Progress = lambda _: None) -> Installed:
    """Install a harness, unless its pinned version is there.

    Args:
        progress: told in a few words what is being done.

    Raises:
        UsageError: there is no such harness, or a tool that installs it is missing.
        PolarError: the installation failed; the message has its last words.
    """
    harness = by_name(name)
    target = harness_folder(harness.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(target.with_name(f".{harness.name}.lock")):
        found = harness.find()
        if found is None or found.version != (harness.pinned or found.version):
            found = _build(harness, target, progress)
    return found


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(harness: Harness, target: Path, progress: Progress) -> Installed:
    builders = {"pi": _build_pi, "mini_swe_agent": _build_mini}
    built = Path(tempfile.mkdtemp(prefix=f".{harness.name}-", dir=target.parent))
    try:
        progress(f"installing {harness.name} {harness.pinned}")
        builders[harness.name](built, str(harness.pinned))
        shutil.rmtree(target, ignore_errors=True)  # an older version
        os.rename(built, target)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    found = harness.find()
    if found is None:
        raise PolarError(f"{harness.name} was installed into {target} but can't be found there: remove that folder")
    progress(f"{harness.name} {found.version} is in {target}")
    return found


def _build_pi(folder: Path, version: str) -> None:
    """By a lock file that pins every package with its hash."""
    npm = shutil.which("npm")
    if npm is None or _node_version() < (20, 6):
        raise UsageError(NODE)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(Path(__file__).parent / "lock" / "pi" / name, folder / name)
    _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)], folder)


def _build_mini(folder: Path, version: str) -> None:
    """In a virtual environment of its own, made from the interpreter behind this one."""
    python = str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())
    wanted = f"mini-swe-agent=={version}"
    inside = str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", python, str(folder)], folder)
        _run([uv, "pip", "install", "--quiet", "--python", inside, wanted], folder)
    else:
        _run([python, "-m", "venv", str(folder)], folder)
        _run([inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted], folder)


def _run(line: Sequence[str], folder: Path) -> None:
    done = subprocess.run(line, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())[-400:]
        raise PolarError(f"{Path(line[0]).name} {line[1]} failed with exit code {done.returncode}: {words}")


def _node_version() -> tuple[int, ...]:
    node = shutil.which("node")
    if node is None:
        return (0,)
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(number) for number in re.findall(r"\d+", said)) or (0,)
