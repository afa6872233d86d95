"""The protocol of runtime backends: each makes sandboxes of one kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polar.contract.runtime import Mount, Runtime
from polar.contract.task import RuntimeSpec


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a backend works on this host. Where it does not, ``fix`` says what to do, in one line."""

    ok: bool
    detail: str
    fix: str | None = None


class RuntimeBackend(Protocol):
    """Makes sandboxes of one kind."""

    name: str

    async def probe(self) -> Probe:
        """Try it, for real, on this host."""
        ...

    def check(self, spec: RuntimeSpec) -> None:
        """See that this backend could make such a sandbox, before any is made.

        Raises:
            UsageError: it could not; the message names the setting.
        """
        ...

    async def create(self, spec: RuntimeSpec, *, folder: Path, mounts: Sequence[Mount] = ()) -> Runtime:
        """A running sandbox whose files live under ``folder`` on the host. ``spec.prepare`` is run by the
        caller through ``exec``.

        Raises:
            RuntimeFailure: it can't be made.
        """
        ...
