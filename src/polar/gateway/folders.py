"""Why: what the commands of a session said is in files of its node, which no store knows of. Retention is for them,
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from polar.runtimes import tree


def forget_folders(sessions: Path, before: float, held: Collection[str]) -> int:
    """Remove the folders of session attempts in which nothing was made or removed since ``before`` (epoch seconds),
    as is done last when an attempt ends; and those of sessions with the last of them. How many attempts that were.

    Args:
        held: ids of sessions that still run here.

    What is no folder is not of a session, and stays.

    Raises:
        OSError: one can't be removed.
    """
    removed = 0
    for session in _folders(sessions):
        if session.name in held:
            continue
        attempts = list(_folders(session))
        old = [attempt for attempt in attempts if attempt.stat().st_mtime < before]
        for attempt in old:
            tree.remove(attempt)
        removed += len(old)
        if len(old) == len(attempts):
            with contextlib.suppress(OSError):  # a new attempt has begun meanwhile, or somebody put something there
                session.rmdir()
    return removed


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
