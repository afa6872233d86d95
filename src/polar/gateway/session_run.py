"""One session attempt from INIT to its result: what each stage does.

A stage raises ``PolarError`` where it can't go on; the session then ends as ERROR with that line, with the
traces of whatever it had captured.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec

import polar
from polar.contract.arrays import to_json
from polar.contract.completion import Completion
from polar.contract.errors import PolarError
from polar.contract.result import SessionResult, SessionState, Trajectory
from polar.contract.runtime import Command, ExecResult, Runtime
from polar.contract.task import TaskRequest
from polar.evaluators.base import Evaluator
from polar.gateway import disk
from polar.gateway.budget import Budget
from polar.gateway.evaluation import SessionEvaluation
from polar.gateway.node import Node
from polar.gateway.preparing import prepare
from polar.gateway.provenance import provenance
from polar.gateway.session import LiveSession, new_key
from polar.gateway.session_log import log_begin, log_end
from polar.harnesses import standard_env
from polar.harnesses.base import Endpoint, Harness, Installed, Plan
from polar.runtimes.base import RuntimeBackend
from polar.store.base import SessionRecord, StoreFailure
from polar.trajectories.assemble import assemble, record_evaluation, unbuilt

log = logging.getLogger("polar.sessions")

Status = Literal["COMPLETED", "TIMEOUT", "ERROR"]
OnChange = Callable[[SessionRecord], None]
Finish = Callable[[SessionRecord, SessionResult], Awaitable[None]]
"""Keeps a terminal state and its result, in one transaction."""

MOST_CONNECTIONS = 512
"""To the model's endpoint in one sandbox, at a time: what comes from inside must not take what others need."""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a task needs, made ready once for all its sessions."""

    harness: Harness
    installed: Installed
    runtimes: RuntimeBackend
    evaluator: Evaluator
    allow_import: bool = False


class SessionRun:
    """The stages of one session attempt, in the order in which they are called.

    Args:
        on_change: told of every new state, after it is on disk.
        finish: by default the store of the node.
    """

    def __init__(
        self,
        node: Node,
        task: TaskRequest,
        record: SessionRecord,
        parts: Parts,
        on_change: OnChange,
        finish: Finish | None = None,
    ) -> None:
        self.task = task
        self.record = record
        self.timing: dict[str, float] = {}
        self.error: str | None = None
        self.status: Status = "COMPLETED"
        self._node = node
        self._parts = parts
        self._on_change = on_change
        self._finish = finish or node.store.finish_session
        self._started = time.time()
        self._live: LiveSession | None = None
        self._runtime: Runtime | None = None
        self._listener: asyncio.Server | None = None
        self._plan: Plan | None = None
        self._env: dict[str, str] = {}
        self._result: ExecResult | None = None
        self._agent_result: dict[str, str] = {}
        self._evaluation = SessionEvaluation(
            task, record.session_id, parts.evaluator, logs=self.folder, redaction=node.redaction
        )
        self._output_redacted = False
        self._stopped: str | None = None
        self._work: asyncio.Future[None] | None = None

    @property
    def folder(self) -> Path:
        """This attempt's files on the host."""
        return self._node.folder / "sessions" / self.record.session_id / f"attempt-{self.record.attempt}"

    # ---- INIT --------------------------------------------------------------------------------------------

    async def initialize(self) -> None:
        """A prepared runtime, a model endpoint that lives as long as the session, the harness's files."""
        await self._enter("INITIALIZING")
        self._started = time.time()
        log_begin(self.record)
        with self._timed("init"):
            async with Budget("INIT", self.task.timeout_seconds):
                await self._prepare()

    async def _prepare(self) -> None:
        runtime = await self._parts.runtimes.create(
            self.task.runtime, folder=self.folder / "runtime", mounts=self._parts.installed.mounts
        )
        self._runtime = runtime
        await prepare(runtime, self.task, self.folder, "prepare")
        self._live = LiveSession(
            session_id=self.record.session_id,
            task_id=self.task.task_id,
            attempt=self.record.attempt,
            pins=self.task.sampling,
            key=new_key(self._node.worker),
            require_token_ids=self._node.require_token_ids,
        )
        self._node.gateway.open(self._live)
        if runtime.listener is not None:
            self._listener = await self._node.server.serve(runtime.listener, connections=MOST_CONNECTIONS)
        endpoint = Endpoint(
            url=runtime.inside_url(self._node.server.url),
            api_key=self._live.key,
            model=self.task.agent.model_name or self._node.engine.info.model,
            context_length=self._node.context_length,
        )
        agent, installed = self.task.agent, self._parts.installed
        self._plan = self._parts.harness.plan(agent, self.task.instruction, endpoint, installed)
        for path, text in self._plan.files.items():
            where = f"{runtime.home}/{path[2:]}" if path.startswith("~/") else path
            await runtime.write_file(where, text.encode())
        self._env = standard_env(
            endpoint, session_id=self.record.session_id, task_id=self.task.task_id, runtime=runtime
        )

    # ---- READY, RUNNING ----------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Prepared, and waiting for a place to run: that costs nothing."""
        await self._enter("READY")

    async def run(self) -> None:
        """The harness, to its end or to its time limit; afterwards nothing of it runs and its key is closed."""
        assert self._runtime is not None
        assert self._plan is not None
        assert self._live is not None
        await self._enter("RUNNING")
        self._evaluation.warm_up(self._runtime)
        left = self.task.timeout_seconds - self.timing.get("init", 0.0)
        limit = min(left, self.task.agent_timeout_seconds or self.task.metadata.get("agent_timeout") or left)
        env = {**self._env, **self.task.runtime.env, **self._plan.command.env, **self.task.agent.env}
        command = Command(self._plan.command.argv, env=env, cwd=self._plan.command.cwd)
        with self._timed("run"):
            try:
                self._result = await self._runtime.exec(command, timeout=limit, logs=self.folder, name="agent")
            finally:
                await self._node.gateway.close(self._live)
                await self._runtime.kill()
        if self._live.broken is not None:
            self.fail(self._live.broken)
        elif self._result.timed_out:
            self.status = "TIMEOUT"
            source = "agent" if limit < left else "session"
            self._agent_result = {"status": "timeout", "timeout_source": source, "timeout_stage": "exec"}
            self.error = f"the agent was stopped after {limit:g} s"
        else:
            self.fail(await asyncio.to_thread(self._parts.harness.judge, self._result))

    # ---- POST_RUN ----------------------------------------------------------------------------------------

    async def ran(self) -> None:
        """The agent has ended, and what is left waits for a place."""
        if self.status == "ERROR":  # it is not going to be evaluated
            await self._evaluation.close()
        await self._enter("POST_RUN")

    async def finish(self) -> None:
        """Traces, reward, and the terminal state with its result in one transaction.

        Raises:
            PolarError: the store can't keep it: the session has not ended.
        """
        if self._live is not None:
            await self._node.gateway.close(self._live)
        completions = await self._node.store.completions(self.record.session_id, self.record.attempt)
        trajectory: Trajectory | None = None
        try:
            async with Budget("POST_RUN", self._evaluation.seconds) as budget:
                await self._enter("BUILDING")
                with self._timed("build"):
                    self._require_calls(completions)
                    trajectory = await asyncio.to_thread(self._assemble, completions)
                if self.status != "ERROR" and self._runtime is not None:
                    await self._enter("EVALUATING")
                    with self._timed("evaluate"):
                        await self.guard(self._evaluate(self._runtime, trajectory, budget))
        except StoreFailure:
            raise
        except (PolarError, OSError) as error:
            self.fail(str(error) or type(error).__name__)
        except Exception as error:
            self.fail(f"{self.record.state.lower()} failed: {type(error).__name__}: {error}")
        self._require_own_fault()
        await self._evaluation.close()
        await asyncio.to_thread(self._redact_output)
        await self._end(self._make_result(self._scored(trajectory, completions)))

    def _require_own_fault(self) -> None:
        """What failed because nothing could be kept here has not ended: it is to be run again."""
        if self.status == "COMPLETED" or self._stopped is not None:
            return
        if self._live is not None and self._live.unkept is not None:
            raise StoreFailure(self._live.unkept)
        if disk.is_full(self._node.folder):
            raise StoreFailure(f"{disk.full(self._node.folder)} ({self.error})")

    def _require_calls(self, completions: list[Completion]) -> None:
        if completions or self.task.agent.settings.get("allow_no_model_call"):
            return
        if self._result is None:
            return  # the harness never ran, and the error says why
        assert self._live is not None
        why = f" ({self.error})" if self.error else ""
        self.status, self.error = "ERROR", f"{self._node.why_no_call(self._live, 'the harness')}{why}"

    async def _evaluate(self, runtime: Runtime, trajectory: Trajectory, budget: Budget) -> None:
        timed_out = self.status == "TIMEOUT"
        await self._evaluation.evaluate(runtime, trajectory, ended=self._result, timed_out=timed_out, budget=budget)

    def _assemble(self, completions: list[Completion]) -> Trajectory:
        return assemble(
            completions,
            self.task.builder,
            provenance=self._provenance(),
            policy_version=self.task.metadata.get("policy_version"),
            allow_import=self._parts.allow_import,
        )

    def _scored(self, trajectory: Trajectory | None, completions: list[Completion]) -> Trajectory:
        """The trajectory with its rewards and how the session ended. Where no traces could be built, the calls
        are accounted for all the same."""
        if trajectory is None:
            trajectory = unbuilt(completions, self.task.builder, self._provenance())
        try:
            record_evaluation(
                trajectory,
                outcome_reward=self._evaluation.result.outcome_reward,
                trace_rewards=self._evaluation.result.trace_rewards,
                evaluation=self._evaluation.told(),
            )
        except ValueError as error:
            self.fail(f"evaluator {self.task.evaluator.strategy}: {error}")
        if self._agent_result:
            trajectory.metadata["agent_result"] = self._agent_result
        trajectory.status, trajectory.error = self.status, self.error
        return trajectory

    def _redact_output(self) -> None:
        """What the commands of the session said, once everybody who reads it has: on a thread."""
        if self._node.redaction is None or self._output_redacted:
            return
        done = True
        for path in [*self.folder.glob("*.stdout"), *self.folder.glob("*.stderr")]:
            try:
                try:
                    self._node.redaction.file(path)
                except (OSError, PolarError) as error:
                    path.unlink(missing_ok=True)
                    log.error("session %s: %s was removed: %s", self.record.session_id, path.name, error)
            except OSError as error:
                done = False
                log.error("session %s: %s is not redacted yet: %s", self.record.session_id, path.name, error)
        self._output_redacted = done  # what is left is tried once more when the session lets go

    def _provenance(self) -> dict[str, Any]:
        return provenance(
            self._node,
            harness=self._parts.harness.name,
            harness_version=self._parts.installed.version,
            evaluator=self.task.evaluator.strategy,
            config_digest=hashlib.sha256(to_json(self.task)).hexdigest(),
            started_at=self._started,
        )

    def _make_result(self, trajectory: Trajectory) -> SessionResult:
        if self._evaluation.warm_seconds is not None:
            self.timing["warm"] = self._evaluation.warm_seconds
        return SessionResult(
            session_id=self.record.session_id,
            task_id=self.task.task_id,
            attempt=self.record.attempt,
            status=self.status,
            trajectory=trajectory,
            timing={name: round(seconds, 3) for name, seconds in self.timing.items()},
            node_id=self._node.node_id,
            error=self.error,
            metadata=dict(self.task.metadata),
        )

    async def _end(self, result: SessionResult) -> None:
        ended = msgspec.structs.replace(self.record, state=self.status, error=self.error, updated_at=time.time())
        await self._finish(ended, result)
        log_end(ended, result, time.time() - self._started)
        self.record = ended
        await self.release()
        self._on_change(ended)

    # ---- at any time -------------------------------------------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the session now, as ERROR with this reason. The traces of what it has captured are still built."""
        self._stopped = self._stopped or reason
        self._evaluation.cancel()
        if self._work is not None:
            self._work.cancel()

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a piece of work that ``stop`` cuts off."""
        if self._stopped is None:
            self._work = asyncio.ensure_future(work)
            try:
                await self._work
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._stopped is None or (task is not None and task.cancelling()):
                    raise
            finally:
                self._work = None
        else:
            work.close()
        self.fail(self._stopped)

    def fail(self, error: str | None) -> None:
        """The session will end as ERROR with this line, if there is one."""
        if error is not None:
            self.status = "ERROR"
            self.error = self._node.kept_error(error)

    async def release(self) -> None:
        """Let go of the runtime and the endpoint, and of everything that was kept for them. Safe to call twice,
        and at any stage. What can't be cleaned up is logged: it is no reason for another session to fail."""
        live, self._live = self._live, None
        listener, self._listener = self._listener, None
        runtime, self._runtime = self._runtime, None
        self._plan = None
        try:
            try:
                if live is not None:
                    await self._node.gateway.close(live)
                    self._node.gateway.forget(live)
                if listener is not None:
                    await self._node.server.release(listener)
                await self._evaluation.close()
                if runtime is not None:
                    await runtime.close()
            finally:
                await asyncio.to_thread(self._redact_output)
        except (OSError, PolarError) as error:
            log.error("session %s: cleaning up: %s", self.record.session_id, error)

    async def _enter(self, state: SessionState) -> None:
        self.record = msgspec.structs.replace(self.record, state=state, updated_at=time.time())
        await self._node.store.put_session(self.record)
        self._on_change(self.record)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.timing[stage] = time.monotonic() - begin


def ended_before_it_began(
    record: SessionRecord, task: TaskRequest, error: str, node_id: str
) -> tuple[SessionRecord, SessionResult]:
    """A session that can't be run here, as ended: its record and its result."""
    trajectory = unbuilt([], task.builder, {"polar": polar.__version__, "ended_at": time.time()})
    trajectory.status, trajectory.error = "ERROR", error
    result = SessionResult(
        session_id=record.session_id,
        task_id=record.task_id,
        attempt=record.attempt,
        status="ERROR",
        trajectory=trajectory,
        node_id=node_id,
        error=error,
        metadata=dict(task.metadata),
    )
    return msgspec.structs.replace(record, state="ERROR", error=error, updated_at=time.time()), result
