"""Where a harness and the interpreter under it are on this host, and what a sandbox must show of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from polar.contract.runtime import Mount

SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
"""Shown by every sandbox."""


def harness_folder(name: str) -> Path:
    """Where Polar installs a harness: ``$POLAR_HOME/harnesses/NAME``, by default under ``~/.cache/polar``."""
    home = os.environ.get("POLAR_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "polar") / "harnesses" / name


def on_path(program: str) -> Path | None:
    """A program on PATH, behind all links."""
    found = shutil.which(program)
    return Path(found).resolve() if found else None


def interpreter_mounts(program: Path) -> tuple[Mount, ...]:
    """What an interpreter needs to be seen: its prefix, or itself alone where that would show somebody's HOME."""
    if any(program.is_relative_to(folder) for folder in SYSTEM):
        return ()
    prefix = program.parent.parent
    if Path.home().is_relative_to(prefix):
        return (Mount(program),)
    return (Mount(prefix),)


def venv_mounts(venv: Path) -> tuple[Mount, ...]:
    """A virtual environment and the interpreter that it was made from."""
    python = (venv / "bin" / "python").resolve()
    return (Mount(venv), *interpreter_mounts(python))
