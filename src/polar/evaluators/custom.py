"""An evaluator of the user's own, named by ``evaluator.strategy: module:Class``: code that runs with the gateway's
rights, so only where the operator allows it."""

from __future__ import annotations

from typing import cast

from polar.contract.errors import UsageError
from polar.contract.loading import make_named
from polar.contract.task import EvaluatorSpec
from polar.evaluators.base import Evaluator


def load(spec: EvaluatorSpec, *, allow_import: bool) -> Evaluator:
    """An instance, made with the spec as its one argument.

    Raises:
        UsageError: it is not allowed, not there, or no evaluator.
    """
    if not allow_import:
        raise UsageError(f"evaluator.strategy {spec.strategy!r} is not allowed unless you pass --allow-import")
    made = make_named(spec.strategy, "evaluator.strategy", spec)
    if not hasattr(made, "evaluate") or not hasattr(made, "name"):
        raise UsageError(f"evaluator.strategy {spec.strategy!r} is no evaluator: it needs name and evaluate")
    return cast(Evaluator, made)
