"""The protocol of harnesses: how an unmodified agent program is configured, started and judged.

A harness never sees Polar: it gets a base URL and a key, and the program is none the wiser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polar.contract.runtime import Command, ExecResult, Mount
from polar.contract.task import AgentSpec


@dataclass(frozen=True, slots=True)
class Installed:
    """Where a harness is on this host. ``mounts`` are what a sandbox must show for it to run."""

    version: str
    executable: Path
    mounts: Sequence[Mount] = ()


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model as the harness will reach it: ``url`` has no path (``http://127.0.0.1:8080``)."""

    url: str
    api_key: str
    model: str
    context_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What to put into the sandbox and what to run there. File paths starting with ``~/`` are under HOME."""

    command: Command
    files: Mapping[str, str] = field(default_factory=dict)


class Harness(Protocol):
    """One agent program."""

    name: str
    pinned: str | None
    """The version known to work; ``None`` where there is nothing to install."""
    install_hint: str
    """One line that installs the pinned version."""

    def find(self) -> Installed | None:
        """Look for it on this host; ``None`` if it is not there."""
        ...

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        """Its configuration and command for one session.

        Raises:
            UsageError: the agent spec does not fit this harness.
        """
        ...

    def judge(self, result: ExecResult) -> str | None:
        """Why this run failed, in one line, or ``None``. Exit codes alone are not trusted where the program
        is known to end with 0 on failure. Timeouts are not judged here."""
        ...


class BuiltIn(Harness, Protocol):
    """A harness that comes with Polar: what it can do is known where it is not installed, too."""

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        """The settings of an agent spec that fits this harness; nothing of this host is looked at.

        Raises:
            UsageError: it does not fit.
        """
        ...
