"""Finished sessions for tests: a real sandbox with a workspace in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polar.contract.result import Trajectory
from polar.contract.runtime import Runtime
from polar.contract.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest
from polar.evaluators import Evaluation, FinishedSession, make_evaluator


def finished(
    runtime: Runtime | None,
    logs: Path,
    *,
    eval_prepare: tuple[str, ...] = (),
    exit_code: int | None = 0,
    timed_out: bool = False,
    timeout: float = 60.0,
) -> FinishedSession:
    task = TaskRequest(
        task_id="t",
        instruction="i",
        agent=AgentSpec(harness="shell"),
        runtime=RuntimeSpec(eval_prepare=eval_prepare),
    )
    return FinishedSession(
        task=task,
        session_id="s",
        agent_exit_code=exit_code,
        timed_out=timed_out,
        trajectory=Trajectory(status="COMPLETED"),
        runtime=runtime,  # type: ignore[arg-type]
        sandbox=runtime.fork if runtime else None,  # type: ignore[arg-type]
        logs=logs,
        timeout=timeout,
    )


async def score(session: FinishedSession, strategy: str = "test_on_output", **config: Any) -> Evaluation:
    env = config.pop("env", {})
    return await make_evaluator(EvaluatorSpec(strategy=strategy, config=config, env=env)).evaluate(session)
