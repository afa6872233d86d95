"""One writing process per database file.

SQLite itself lets several processes write in turn, but Polar's writer knows that what it read stays true
until it commits, and two gateways over one file would be two truths. The lock is an ``flock`` on a file
beside the database: the kernel lets go of it when the process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

from polar.contract.errors import UsageError


class FileLock:
    """Held from ``take`` to ``release``, or to the end of the process."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = database.with_name(database.name + ".lock")
        self._fd: int | None = None

    def take(self) -> None:
        """Become the one that writes.

        Raises:
            UsageError: another does; the message says who.
            OSError: the lock file can't be made.
        """
        while self._fd is None:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The one before us may have removed the file between our open and our lock.
                if self._is_ours(fd):
                    os.ftruncate(fd, 0)
                    os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    self._fd = fd
            except BlockingIOError:
                holder = os.pread(fd, 400, 0).decode(errors="replace") or "another process"
                raise UsageError(
                    f"{self._database} is being written by {holder}: stop it, or name another file with "
                    "--store (polar show and polar export can read it meanwhile)"
                ) from None
            finally:
                if self._fd is None:
                    os.close(fd)

    def release(self) -> None:
        """Let go, and leave no file behind. Safe to call twice."""
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None

    def left_by_the_dead(self) -> bool:
        """Whether a process of this machine was killed while it held the lock, and none has taken it since. Nothing
        is locked to find out: whoever takes the lock meanwhile must get it."""
        try:
            said = re.fullmatch(r"process (\d+) on (.*)", self._path.read_text(errors="replace"))
        except OSError:
            return False
        if said is None or said[2] != socket.gethostname():
            return False
        try:
            os.kill(int(said[1]), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def _is_ours(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._path))
        except FileNotFoundError:
            return False
