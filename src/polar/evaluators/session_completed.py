"""The simplest reward: did the agent come to an end by itself?"""

from __future__ import annotations

from polar.contract.errors import UsageError
from polar.contract.task import EvaluatorSpec
from polar.evaluators.base import Evaluation, FinishedSession


class SessionCompleted:
    """1.0 if the agent ended by itself with exit code 0, within its time; else 0.0. It takes no config."""

    name = "session_completed"
    uses_sandbox = False
    seconds = 0.0

    def __init__(self, spec: EvaluatorSpec) -> None:
        if spec.config:
            raise UsageError(f"evaluator.config.{min(spec.config)} is not known: session_completed takes no config")

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        completed = session.agent_exit_code == 0 and not session.timed_out
        return Evaluation(
            outcome_reward=1.0 if completed else 0.0,
            metadata={"exit_code": session.agent_exit_code, "timed_out": session.timed_out},
        )
