"""The protocol of evaluators: a finished session to a reward.

Evaluation never trusts what the agent could touch: an evaluator that runs anything does so in a fork of the
runtime, where nothing the agent started is alive, and reads results from outside the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polar.contract.errors import PolarError
from polar.contract.result import Trajectory
from polar.contract.runtime import Runtime
from polar.contract.task import TaskRequest


class EvaluationFailed(PolarError):
    """The evaluator itself could not do its work: the session is an error, never a silent zero."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A reward for the whole session, or one for each trace (in the trajectory's order), with details."""

    outcome_reward: float | None = None
    trace_rewards: Sequence[float] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedSession:
    """What an evaluator may look at. ``runtime`` is the agent's own, already without processes: use its
    ``fork``. ``logs`` is a host folder; the agent's output is ``agent.stdout`` and ``agent.stderr`` there."""

    task: TaskRequest
    session_id: str
    agent_exit_code: int | None
    timed_out: bool
    trajectory: Trajectory
    runtime: Runtime
    logs: Path
    timeout: float
    """Seconds this evaluation may take."""


class Evaluator(Protocol):
    """One way to score."""

    name: str

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        """Score it.

        Raises:
            EvaluationFailed: it can't be scored; the message says why.
        """
        ...
