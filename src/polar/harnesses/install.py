"""Put a harness's pinned version under ``$POLAR_HOME/harnesses``: all of it or nothing, and never twice.

It is built in a folder beside its place and moved there in one step, so a broken download leaves nothing that
looks installed. Of two installers at once the second waits, and finds it done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from polar.contract.errors import PolarError
from polar.harnesses import by_name
from polar.harnesses.base import Harness, Installed
from polar.harnesses.found import harness_folder
from polar.harnesses.packages import Packaged

Progress = Callable[[str], None]


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
    if not isinstance(harness, Packaged):
        raise PolarError(f"{harness.name}: {harness.install_hint}")
    built = Path(tempfile.mkdtemp(prefix=f".{harness.name}-", dir=target.parent))
    try:
        progress(f"installing {harness.name} {harness.pinned}")
        harness.package.build(built)
        shutil.rmtree(target, ignore_errors=True)  # an older version
        os.rename(built, target)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    found = harness.find()
    if found is None:
        raise PolarError(f"{harness.name} was installed into {target} but can't be found there: remove that folder")
    progress(f"{harness.name} {found.version} is in {target}")
    return found
