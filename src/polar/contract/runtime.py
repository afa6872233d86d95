"""The protocol of runtimes: a sandbox that is prepared, runs commands, and is gone afterwards with every
process that was ever started in it, however it was left."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar.contract.errors import PolarError


class RuntimeFailure(PolarError):
    """The sandbox could not be made or a step in it failed; the message has the command and its last words."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. ``exit_code`` is negative for a signal; the logs are files on the host."""

    exit_code: int
    timed_out: bool
    stdout: Path
    stderr: Path


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run inside: an argument list, or one string for ``/bin/sh -c`` (a pipe there can't hide a
    failure: ``pipefail`` is on)."""

    argv: Sequence[str] | str
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder shown inside, read-only, at the same path unless ``target`` says otherwise."""

    source: Path
    target: str | None = None


class Runtime(Protocol):
    """One sandbox."""

    workdir: str
    """The workspace, as a path inside."""
    home: str
    """HOME inside: private to this sandbox."""
    listener: socket.socket | None
    """A listening socket that lives inside the sandbox's own network, for the gateway to serve; ``None`` where
    the sandbox shares the host's network."""

    def inside_url(self, gateway_url: str) -> str:
        """The gateway's address as the sandbox must say it (``http://127.0.0.1:8080``)."""
        ...

    async def exec(self, command: Command, *, timeout: float, logs: Path, name: str) -> ExecResult:
        """Run a command to its end, or to ``timeout`` seconds, when its whole process tree is killed. Output
        goes to ``logs/name.stdout`` and ``logs/name.stderr``, which are there even after a timeout."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Put a file inside; missing folders are made. Relative paths are under the workspace."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Fetch a file from inside.

        Raises:
            FileNotFoundError: it is not there, or is no regular file.
        """
        ...

    async def fresh(self) -> Runtime:
        """Another sandbox, made as this one was, with nothing of this one in it and no way to the model. It goes
        with this one, if it is not closed before."""
        ...

    async def copy_workspace(self, target: Runtime) -> None:
        """Put a copy of the workspace as it is now in place of all that is in the workspace of ``target``, one that
        ``fresh`` gave. What runs in there goes on, and must not write there meanwhile.

        Raises:
            RuntimeFailure: it can't be copied.
        """
        ...

    async def fork(self) -> Runtime:
        """A fresh sandbox with a copy of the workspace as it is now and nothing else of this one: no process,
        no HOME, no /tmp, no network."""
        ...

    async def kill(self) -> None:
        """End every process inside, now. Files stay readable."""
        ...

    async def close(self) -> None:
        """Kill and remove. Safe to call twice."""
        ...
