"""A harness of the user's own, named by ``agent.import_path: module:Class``: code that runs with the gateway's
rights, so only where the operator allows it."""

from __future__ import annotations

from typing import cast

from polar.contract.errors import UsageError
from polar.contract.loading import make_named
from polar.harnesses.base import Harness

PARTS = ("name", "pinned", "install_hint", "find", "plan", "judge")


def load(import_path: str, *, allow_import: bool) -> Harness:
    """An instance of the class.

    Raises:
        UsageError: it is not allowed, not there, or no harness.
    """
    if not allow_import:
        raise UsageError("agent.import_path is not allowed unless you pass --allow-import")
    made = make_named(import_path, "agent.import_path")
    if missing := [part for part in PARTS if not hasattr(made, part)]:
        raise UsageError(f"agent.import_path {import_path!r} is no harness: it has no {missing[0]}")
    return cast(Harness, made)
