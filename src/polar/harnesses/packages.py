"""The two ways a harness comes onto a host, npm and pip, said once: where it is found, what a sandbox must show
of it, and how its pinned version is put into an empty folder.

Every version is in ``lock/NAME``: a harness that behaves otherwise than tested would spoil a training run unseen.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from polar.contract.errors import PolarError, UsageError
from polar.contract.runtime import Mount
from polar.harnesses.base import Installed
from polar.harnesses.found import harness_folder, interpreter_mounts, on_path, venv_mounts

LOCK = Path(__file__).parent / "lock"
INSTALLER_NODE = (20, 0)
"""What the npm that installs a native program must run on."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A harness from npm.

    Args:
        name: the harness.
        program: the file that is run, as a pattern below ``node_modules``.
        command: what a user's own installation is called on PATH.
        node: the least Node.js that the program runs on; ``None`` where it is a native one.
    """

    name: str
    program: str
    command: str
    node: tuple[int, int] | None = None

    def find(self) -> Installed | None:
        """Polar's own installation, else the user's; none of them where there is no Node.js that it runs on."""
        node = on_path("node")
        if self.node and _node_version() < self.node:
            return None
        for modules in self._places():
            for program in sorted(modules.glob(self.program)):
                if version := _package_version(program):
                    mounts = interpreter_mounts(node) if self.node and node else ()
                    return Installed(version, program, (Mount(_outermost(program)), *mounts))
        return None

    def build(self, folder: Path) -> None:
        """Install the pinned version into an empty folder, by a lock file that pins every package with its hash.

        Raises:
            UsageError: there is no Node.js with npm, or an old one.
            PolarError: npm failed.
        """
        npm, least = shutil.which("npm"), self.node or INSTALLER_NODE
        if npm is None or _node_version() < least:
            wanted = f"{least[0]}.{least[1]}" if least[1] else f"{least[0]}"
            raise UsageError(
                f"{self.name} needs Node.js {wanted} or newer with npm: apt-get install nodejs npm, or nvm install 22"
            )
        for name in ("package.json", "package-lock.json"):
            shutil.copy(LOCK / self.name / name, folder / name)
        run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)], folder)

    def _places(self) -> Iterator[Path]:
        yield harness_folder(self.name) / "node_modules"
        script = on_path(self.command)
        for parent in script.parents if script else ():
            if parent.name == "node_modules":
                yield parent
            elif (parent / "package.json").is_file():  # its own dependencies, where npm nested them
                yield parent / "node_modules"


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """A harness from PyPI, in a virtual environment of its own.

    Args:
        name: the harness.
        distribution: the one whose version is the harness's, as in its ``.dist-info`` folder.
        python: the least Python.
        command: what a user's own installation is called on PATH, if it has a command.
    """

    name: str
    distribution: str
    python: tuple[int, int]
    command: str | None = None

    def find(self) -> Installed | None:
        """Polar's own installation, else the user's. The executable is the environment's interpreter."""
        own = on_path(self.command) if self.command else None
        for venv in (harness_folder(self.name), *([own.parent.parent] if own else [])):
            for info in venv.glob(f"lib/python3*/site-packages/{self.distribution}-*.dist-info"):
                version = info.name.removeprefix(f"{self.distribution}-").removesuffix(".dist-info")
                return Installed(version, venv / "bin" / "python", venv_mounts(venv))
        return None

    def build(self, folder: Path) -> None:
        """Make an environment in an empty folder and install the pinned versions into it.

        Raises:
            UsageError: there is no Python that is new enough.
            PolarError: the installation failed.
        """
        python = find_python(self.python)
        if python is None:
            wanted = ".".join(map(str, self.python))
            raise UsageError(
                f"{self.name} needs Python {wanted} or newer, and there is none on PATH: "
                f"apt-get install python{wanted} python{wanted}-venv, or pyenv install {wanted}"
            )
        wanted, inside = str(LOCK / self.name / "requirements.txt"), str(folder / "bin" / "python")
        beside = Path(sys.executable).parent  # where scripts/setup has put one
        if uv := shutil.which("uv") or shutil.which("uv", path=str(beside)):
            run([uv, "venv", "--quiet", "--allow-existing", "--python", str(python), str(folder)], folder)
            # A sandbox can't write here: each session would compile all that it imports anew.
            options = ["--quiet", "--compile-bytecode", "--python", inside]
            run([uv, "pip", "install", *options, "-r", wanted], folder)
        else:
            run([str(python), "-m", "venv", str(folder)], folder)
            pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
            run([*pip, "-r", wanted], folder)


@runtime_checkable
class Packaged(Protocol):
    """A harness that Polar can install."""

    package: NpmPackage | PythonPackage


def node() -> str:
    """The Node.js that a harness found on this host runs on."""
    return str(on_path("node") or "node")


def find_python(least: tuple[int, int]) -> Path | None:
    """A Python of at least this version: the one behind this process, else one on PATH or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    names = [f"python{least[0]}.{minor}" for minor in range(least[1], least[1] + 4)]
    tried: list[Path | str | None] = [getattr(sys, "_base_executable", None) or sys.executable]
    tried += [shutil.which(name) for name in [*names, "python3"]]
    tried += [program for name in names for program in sorted(pyenv.glob(f"versions/*/bin/{name}"))]
    for program in tried:
        # Asked, not believed: pyenv puts scripts of these names on PATH that lead nowhere.
        ask = [str(program), "-c", "import sys; print(*sys.version_info[:2], sys.executable)"]
        said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split() if program else []
        if len(said) == 3 and (int(said[0]), int(said[1])) >= least:
            return Path(said[2]).resolve()
    return None


def run(line: Sequence[str], folder: Path) -> None:
    """Run an installer.

    Raises:
        PolarError: it failed; the message has its last words.
    """
    done = subprocess.run(line, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        words = " ".join((done.stderr or done.stdout).split())[-400:]
        raise PolarError(f"{Path(line[0]).name} {line[1]} failed with exit code {done.returncode}: {words}")


def _package_version(program: Path) -> str | None:
    """The version of the package that a file belongs to; platform packages have the platform behind it."""
    for parent in program.parents:
        if parent.name == "node_modules":
            return None
        try:
            found = json.loads((parent / "package.json").read_bytes()).get("version")
        except (OSError, ValueError):
            continue
        if version := re.match(r"\d+\.\d+\.\d+", str(found)):
            return version[0]
    return None


def _outermost(program: Path) -> Path:
    """The outermost ``node_modules`` that a file lies in: all that it needs is there."""
    return [folder for folder in program.parents if folder.name == "node_modules"][-1]


def _node_version() -> tuple[int, ...]:
    program = on_path("node")
    return _version_of(program, program.stat().st_mtime_ns) if program else (0,)


@lru_cache(maxsize=4)
def _version_of(program: Path, changed: int) -> tuple[int, ...]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return tuple(int(number) for number in re.findall(r"\d+", said)) or (0,)
