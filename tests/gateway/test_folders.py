"""The files of sessions, which go when retention says so, and of those that still run stay."""

from __future__ import annotations

import os
from pathlib import Path

from polar.gateway.folders import forget_folders


def made(sessions: Path, session: str, attempt: int, at: float) -> Path:
    folder = sessions / session / f"attempt-{attempt}"
    folder.mkdir(parents=True)
    (folder / "agent.stdout").write_text("a secret")
    os.utime(folder, (at, at))
    return folder


def test_attempts_that_ended_long_ago_are_removed_and_sessions_with_the_last_of_them(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    assert forget_folders(sessions, 50.0, ()) == 0, "no session has begun here"
    for session, attempt, at in (("old", 1, 10.0), ("old", 2, 20.0), ("again", 1, 10.0), ("runs", 1, 10.0)):
        made(sessions, session, attempt, at)
    fresh = made(sessions, "again", 2, 60.0)
    assert forget_folders(sessions, 50.0, {"runs"}) == 3
    left = sorted(path.relative_to(sessions).as_posix() for path in sessions.rglob("attempt-*"))
    assert left == ["again/attempt-2", "runs/attempt-1"]
    assert not (sessions / "old").exists()
    assert (fresh / "agent.stdout").exists()
