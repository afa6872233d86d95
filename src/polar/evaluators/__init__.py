"""Evaluators: a finished session to a reward. One file each, and one line here."""

from __future__ import annotations

from polar.contract.errors import UsageError
from polar.contract.task import EvaluatorSpec
from polar.evaluators import custom
from polar.evaluators.base import Evaluation, EvaluationFailed, Evaluator, FinishedSession
from polar.evaluators.session_completed import SessionCompleted
from polar.evaluators.test_on_output import TestOnOutput

__all__ = ["Evaluation", "EvaluationFailed", "Evaluator", "FinishedSession", "make_evaluator", "names"]

EVALUATORS: dict[str, type[SessionCompleted] | type[TestOnOutput]] = {
    "session_completed": SessionCompleted,
    "test_on_output": TestOnOutput,
}


def names() -> tuple[str, ...]:
    """Every evaluator that comes with Polar."""
    return tuple(EVALUATORS)


def make_evaluator(spec: EvaluatorSpec, *, allow_import: bool = False) -> Evaluator:
    """The evaluator of a task, its config checked.

    Raises:
        UsageError: it is not known or not allowed, or its config does not fit.
    """
    if ":" in spec.strategy:
        return custom.load(spec, allow_import=allow_import)
    if spec.strategy not in EVALUATORS:
        raise UsageError(f"evaluator {spec.strategy!r} is not known: there are {', '.join(EVALUATORS)}")
    return EVALUATORS[spec.strategy](spec)
