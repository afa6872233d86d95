"""The protocol of evaluators: a finished session to a reward.

Evaluation never trusts what the agent could touch: an evaluator that runs anything does so in a sandbox of its own,
where nothing the agent started is alive, and reads results from outside the workspace.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

from polar.contract.arrays import to_plain
from polar.contract.errors import PolarError
from polar.contract.result import Trajectory
from polar.contract.runtime import Runtime
from polar.contract.task import TaskRequest


class EvaluationFailed(PolarError):
    """The evaluator itself could not do its work: the session is an error, never a silent zero."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A reward for the whole session, or one for each trace (in the trajectory's order), with details. A line in
    ``metadata["warning"]`` says why the reward may mean nothing: it is among the session's warnings."""

    outcome_reward: float | None = None
    trace_rewards: Sequence[float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """What an evaluator may look at. ``runtime`` is the agent's own, already without processes: run things in
    ``sandbox()``. ``logs`` is a host folder; the agent's output is ``agent.stdout`` and ``agent.stderr`` there."""

    task: TaskRequest
    session_id: str
    agent_exit_code: int | None
    timed_out: bool
    trajectory: Trajectory
    runtime: Runtime
    sandbox: Callable[[], Awaitable[Runtime]]
    """``await session.sandbox()`` is a fresh sandbox with a copy of what the agent left in its workspace; with
    ``evaluator.refresh_runtime`` what ``runtime.prepare`` makes elsewhere (HOME, /tmp, services) is there as well.
    Each call gives another one; they go with the session, if they are not closed before. It raises
    ``EvaluationFailed`` where there can be none."""
    logs: Path
    timeout: float
    """Seconds this evaluation may take; those in which ``sandbox()`` has ``runtime.prepare`` run do not count."""


class Evaluator(Protocol):
    """One way to score. A class of your own is made with the task's ``EvaluatorSpec`` as its one argument, and may
    leave out ``uses_sandbox`` and ``seconds``."""

    name: str
    uses_sandbox: bool
    """It is going to call ``sandbox()``, so what takes long about that is done while the agent runs. By default
    false: a sandbox is then made when it is asked for."""
    seconds: float
    """What its own work takes at most, on top of the time that every evaluation has; by default 0."""

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        """Score it.

        Raises:
            EvaluationFailed: it can't be scored; the message says why.
        """
        ...


def checked(evaluation: object, strategy: str) -> Evaluation:
    """What an evaluator returned, with rewards as finite floats and metadata as plain JSON values.

    Raises:
        EvaluationFailed: it is nothing of the kind.
    """
    if not isinstance(evaluation, Evaluation):
        raise EvaluationFailed(f"evaluator {strategy} returned {type(evaluation).__name__}, not an Evaluation")
    try:
        outcome = None if evaluation.outcome_reward is None else _finite(evaluation.outcome_reward)
        by_trace = None if evaluation.trace_rewards is None else [_finite(each) for each in evaluation.trace_rewards]
        metadata = to_plain(evaluation.metadata)
    except (TypeError, ValueError) as error:
        raise EvaluationFailed(f"evaluator {strategy} returned what is no reward or no JSON: {error}") from None
    return Evaluation(outcome, by_trace, metadata)


def _finite(reward: object) -> float:
    if isinstance(reward, str) or not isinstance(reward, SupportsFloat):
        raise TypeError(f"{reward!r} is no number")
    if not math.isfinite(number := float(reward)):
        raise ValueError(f"{reward!r} is not finite")
    return number
