"""Runtimes: the sandboxes that sessions run in. One name, one backend."""

from __future__ import annotations

from polar.contract.errors import UsageError
from polar.runtimes.base import Probe, RuntimeBackend
from polar.runtimes.leftovers import remove_leftovers
from polar.runtimes.local import BubblewrapBackend
from polar.runtimes.process import ProcessBackend
from polar.runtimes.sandbox import refuse_impossible, refuse_unsupported

__all__ = [
    "BubblewrapBackend",
    "Probe",
    "ProcessBackend",
    "RuntimeBackend",
    "backend",
    "refuse_impossible",
    "refuse_unsupported",
    "remove_leftovers",
]

SANDBOXES: dict[str, type[BubblewrapBackend] | type[ProcessBackend]] = {
    "bubblewrap": BubblewrapBackend,
    "none": ProcessBackend,
}


def backend(name: str = "local", *, sandbox: str = "bubblewrap") -> RuntimeBackend:
    """The backend of a task's ``runtime.backend``. ``sandbox`` is the operator's choice, never a fallback.

    Raises:
        UsageError: there is none of that name.
    """
    if name != "local":
        raise UsageError(f"runtime backend {name!r} is not in this version: use local")
    if sandbox not in SANDBOXES:
        raise UsageError(f"sandbox {sandbox!r} is not known: use {' or '.join(SANDBOXES)}")
    return SANDBOXES[sandbox]()
