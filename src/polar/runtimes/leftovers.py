"""What a killed gateway leaves on disk, and how the next one finds it.

A sandbox's folder holds a marker file that its owner keeps locked. The kernel lets go of the lock when the
owner dies, however it died: a marker that can be locked belongs to nobody, and its sandbox's files can go.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from polar.runtimes import tree

MARKER = ".polar-sandbox"
PARTS = ("root", "workspace", "home", "tmp", "forks")


def claim(folder: Path) -> int:
    """Mark a new sandbox's folder as owned; the lock lasts as long as the returned file is open.

    Raises:
        FileExistsError: the folder has a marker, or something with a name that a sandbox uses: not ours to remove.
    """
    for part in PARTS:
        if os.path.lexists(folder / part):
            raise FileExistsError(f"{part} is there already")
    fd = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return fd


def remove(folder: Path) -> None:
    """Remove a sandbox's files and marker, and its folder if nothing else is in it."""
    for part in PARTS:
        tree.remove(folder / part)
    (folder / MARKER).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def remove_leftovers(folder: Path) -> int:
    """Remove the sandboxes that dead owners left anywhere under ``folder``; how many there were. Call it when a
    gateway starts, with its results folder."""
    count = 0
    for place, folders, files in os.walk(folder):
        if MARKER in files:
            folders.clear()  # what is below was written by an agent
            count += _remove_if_ownerless(Path(place))
    return count


def _remove_if_ownerless(folder: Path) -> bool:
    try:
        fd = os.open(folder / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone meanwhile, or somebody else's
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
