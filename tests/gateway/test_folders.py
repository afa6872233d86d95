"""The files of sessions, which go when retention says so, and of those that still run stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polar.gateway.folders import forget_folders
from polar.runtimes import tree


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


def test_what_does_not_belong_there_keeps_no_session_from_going(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    gone = [made(sessions, name, 1, 10.0) for name in ("a", "b")]
    strays = [sessions / "0-notes.txt", sessions / "a" / "notes.txt"]
    for stray in strays:
        stray.write_text("somebody's own")
        os.utime(stray, (10.0, 10.0))
    (sessions / "link").symlink_to(tmp_path)
    assert forget_folders(sessions, 50.0, ()) == 2
    assert not any(folder.exists() for folder in gone)
    assert all(stray.exists() for stray in strays)
    assert sorted(path.name for path in sessions.iterdir()) == ["0-notes.txt", "a", "link"]


def test_an_attempt_that_begins_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = tmp_path / "sessions"
    for name in ("a", "b"):
        made(sessions, name, 1, 10.0)
    remove = tree.remove

    def remove_and_begin(folder: Path) -> None:
        remove(folder)
        made(sessions, folder.parent.name, 2, 60.0)

    monkeypatch.setattr(tree, "remove", remove_and_begin)
    assert forget_folders(sessions, 50.0, ()) == 2
    assert sorted(path.relative_to(sessions).as_posix() for path in sessions.rglob("attempt-*")) == [
        "a/attempt-2", "b/attempt-2"
    ]  # fmt: skip
