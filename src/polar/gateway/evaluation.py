"""Why: tests may need all that the agent's sandbox had (tools in HOME, a service), in a sandbox that the agent never
touched; making that one takes as long as INIT did, so it is made while the agent runs, and waits.

Only where ``evaluator.refresh_runtime`` asks for it. A sandbox with nothing but a copy of the workspace is made when
it is wanted: that takes 29 ms in bubblewrap, of which 24 could be had before, but one that waits for them is four
processes and 2.8 MB (100 of them, two cores), and a node may have a thousand sessions asleep.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from polar.contract.errors import PolarError
from polar.contract.result import Trajectory
from polar.contract.runtime import ExecResult, Runtime
from polar.contract.task import TaskRequest
from polar.evaluators.base import Evaluation, EvaluationFailed, Evaluator, FinishedSession, checked
from polar.gateway.budget import Budget
from polar.gateway.preparing import prepare
from polar.redaction import Redaction

log = logging.getLogger("polar.sessions")

POST_RUN_SECONDS = 600.0
"""The budget of building and evaluating: its own, so that an agent that used all of its time still counts. The
evaluator's own ``seconds`` come on top."""

EVALUATION_MARGIN = 30.0
"""What an evaluator gets less than the whole budget, so that it can say itself that its tests took too long."""


class SessionEvaluation:
    """The evaluation of one session attempt, and the sandboxes that are made for it.

    Args:
        logs: the host folder that what commands say goes to.
    """

    def __init__(
        self, task: TaskRequest, session_id: str, evaluator: Evaluator, logs: Path, redaction: Redaction | None
    ) -> None:
        self.result = Evaluation()
        self.warm_seconds: float | None = None
        """How long it took to make a sandbox while the agent ran."""
        self._task, self._session_id, self._logs = task, session_id, logs
        self._evaluator, self._redaction = evaluator, redaction
        self._refreshed = task.evaluator.refresh_runtime and bool(task.runtime.prepare)
        self._warming: asyncio.Task[Runtime | None] | None = None
        self._ran_out: Exception | None = None
        self._made: list[Runtime] = []
        self._making = asyncio.Lock()

    @property
    def seconds(self) -> float:
        """What building and evaluating may take together."""
        return POST_RUN_SECONDS + self._evaluator.seconds

    def warm_up(self, agent: Runtime) -> None:
        """The agent begins: begin with the sandbox of its evaluation, where that is long work. No pool bounds how
        many do so at a time: no more sessions begin to run than INIT, which has the same work, lets through."""
        if self._evaluator.uses_sandbox and self._refreshed:
            self._warming = asyncio.create_task(self._warm(agent))

    def cancel(self) -> None:
        """Nothing is going to be evaluated; what has been made so far goes with ``close``."""
        if self._warming is not None and not self._warming.cancelling():
            self._warming.cancel()  # and not twice, which would cut off its cleaning up

    async def evaluate(
        self,
        agent: Runtime,
        trajectory: Trajectory,
        *,
        ended: ExecResult | None,
        timed_out: bool,
        budget: Budget,
    ) -> None:
        """Score what the agent left; ``result`` is what came of it.

        Raises:
            PolarError: it can't be scored, or what came of it can't be redacted.
        """

        async def sandbox() -> Runtime:
            async with self._making:
                try:
                    return await self._sandbox(agent, budget)
                except (PolarError, OSError) as error:
                    raise EvaluationFailed(f"the evaluation's sandbox failed: {error}") from error

        session = FinishedSession(
            task=self._task,
            session_id=self._session_id,
            agent_exit_code=ended.exit_code if ended else None,
            timed_out=timed_out,
            trajectory=trajectory,
            runtime=agent,
            sandbox=sandbox,
            logs=self._logs,
            timeout=self.seconds - EVALUATION_MARGIN,
        )
        result = checked(await self._evaluator.evaluate(session), self._task.evaluator.strategy)
        if self._redaction is not None:
            result = dataclasses.replace(result, metadata=self._redaction.value(result.metadata))
        self.result = result

    def told(self) -> dict[str, Any]:
        """``result`` as the trajectory's metadata has it."""
        by_trace = self.result.trace_rewards
        return {
            "strategy": self._task.evaluator.strategy,
            "outcome_reward": self.result.outcome_reward,
            "trace_rewards": None if by_trace is None else list(by_trace),
            **self.result.metadata,
        }

    async def close(self) -> None:
        """End and remove every sandbox that was made here; nothing more is written to their logs. Safe to call
        twice, and at any time."""
        self.cancel()
        if self._warming is not None:
            await asyncio.wait({self._warming})
            self._warming = None
        made, self._made = self._made, []
        for runtime in made:
            try:
                await runtime.close()
            except (OSError, PolarError) as error:
                log.error("session %s: cleaning up: %s", self._session_id, error)

    # ---- sandboxes ---------------------------------------------------------------------------------------

    async def _sandbox(self, agent: Runtime, budget: Budget) -> Runtime:
        if not self._refreshed:
            self._made.append(await agent.fork())
            return self._made[-1]
        with budget.paused():
            warming, self._warming = self._warming, None
            runtime = await warming if warming else None
            if self._ran_out is not None:
                raise self._ran_out
            runtime = runtime or await self._fresh(agent)
        await agent.copy_workspace(runtime)
        return runtime

    async def _warm(self, agent: Runtime) -> Runtime | None:
        """None where it can't be made: the agent runs on, and evaluation tries once more. Not where it took all of
        its time: a second try would hold a place among those that evaluate for as long."""
        began, runtime = time.monotonic(), None
        try:
            runtime = await self._fresh(agent)
        except Exception as error:
            if time.monotonic() - began >= self._task.timeout_seconds:
                self._ran_out, then = error, "is not tried again, as that took all of its time"
            else:
                then = "is made once more when it is needed"
            log.warning(  # without the error's words: results are redacted, logs are not
                "session %s: its evaluation's sandbox could not be made while the agent ran, and %s: %s",
                *(self._session_id, then, type(error).__name__),
            )
        self.warm_seconds = time.monotonic() - began
        return runtime

    async def _fresh(self, agent: Runtime) -> Runtime:
        """A sandbox in which ``runtime.prepare`` has run, as before the agent."""
        async with Budget("runtime.prepare", self._task.timeout_seconds):
            runtime = await agent.fresh()
            self._made.append(runtime)
            try:
                await prepare(runtime, self._task, self._logs, "eval-runtime-prepare")
            except BaseException:
                await runtime.close()
                raise
        return runtime
