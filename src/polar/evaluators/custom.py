"""An evaluator of the user's own, named by ``evaluator.strategy: module:Class``: code that runs with the gateway's
rights, so only where the operator allows it."""

from __future__ import annotations

import math
from typing import Any

from polar.contract.errors import UsageError
from polar.contract.loading import make_named
from polar.contract.task import EvaluatorSpec
from polar.evaluators.base import Evaluation, Evaluator, FinishedSession


class Custom:
    """A class of the user's own, with defaults for what it need not have.

    Raises:
        UsageError: it has what is no number of seconds.
    """

    def __init__(self, made: Any) -> None:
        self.name: str = made.name
        self.uses_sandbox = bool(getattr(made, "uses_sandbox", False))
        seconds = getattr(made, "seconds", 0.0)
        if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise UsageError(f"evaluator {self.name}: its seconds are {seconds!r}, use a number of 0 or more")
        self.seconds = float(seconds)
        self._made = made

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        evaluation: Evaluation = await self._made.evaluate(session)
        return evaluation


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
    return Custom(made)
