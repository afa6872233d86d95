"""What the ledger holds, as answers: results whole again, tasks and sessions in short.

A task's results can be larger than memory, so they are rebuilt, encoded and handed on one at a time; the work on each
is done in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.rollout import NodeInfo, NodeLoad, TaskState
from polar.contract.task import TaskRequest
from polar.results import rebuild
from polar.rollout.wire import WireTaskStatus, encode, wire_result
from polar.store.base import SessionRecord
from polar.store.ledger import Ledger, TaskProgress

log = logging.getLogger("polar.rollout")

Results = Literal["none", "summary", "full"]


class Ended(NamedTuple):
    """A session that has ended, and its result, without traces."""

    record: SessionRecord
    result: SessionResult


async def ended_sessions(ledger: Ledger, task_id: str) -> list[Ended]:
    """The sessions of a task that have ended, in order of sample, with the results of their newest attempts."""
    results = {(result.session_id, result.attempt): result for result in await ledger.results(task_id)}
    found: list[Ended] = []
    for record in await ledger.sessions(task_id):
        result = results.get((record.session_id, record.attempt))
        if record.state in TERMINAL_STATES and result is not None:
            found.append(Ended(record, result))
    return found


async def whole(ledger: Ledger, ended: Ended, *, allow_import: bool) -> bytes:
    """A result with its traces, as JSON."""
    result = ended.result
    try:
        result = await rebuild(ledger, result, allow_import=allow_import)
    except UsageError as error:  # a builder of the task's own that this server does not have
        log.error("session %s: no traces: %s", result.session_id, error, extra={"session_id": result.session_id})
        result.trajectory.error = result.trajectory.error or str(error)
    return await asyncio.to_thread(lambda: encode(wire_result(result, ended.record)))


async def each_result(
    ledger: Ledger, ended: Sequence[Ended], results: Results, *, allow_import: bool
) -> AsyncIterator[bytes]:
    """The results one by one, as JSON: whole, or as ``summary``, without traces."""
    for one in ended if results != "none" else ():
        if results == "full":
            yield await whole(ledger, one, allow_import=allow_import)
        else:
            yield encode(wire_result(one.result, one.record))


async def task_status(
    ledger: Ledger, progress: TaskProgress, results: Results, *, allow_import: bool
) -> AsyncIterator[bytes]:
    """A ``TaskStatus``, as pieces of one JSON document."""
    ended = await ended_sessions(ledger, progress.task_id) if results != "none" else []
    head = WireTaskStatus(
        task_id=progress.task_id,
        status=progress.status,
        total_sessions=progress.sessions,
        completed_sessions=max(progress.ended, len(ended)),
    )
    async for piece in with_results(encode(head), each_result(ledger, ended, results, allow_import=allow_import)):
        yield piece


async def with_results(document: bytes, results: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A JSON object with its empty ``results`` filled, one at a time."""
    before, empty, after = document.rpartition(b'"results":[]')
    yield before + empty[:-1]
    first = True
    async for result in results:
        yield result if first else b"," + result
        first = False
    yield b"]" + after


def whole_nodes(found: Sequence[NodeInfo]) -> list[NodeInfo]:
    """The nodes as their operators named them: workers behind one port are one node."""
    groups: dict[str, list[NodeInfo]] = {}
    for info in found:
        groups.setdefault(info.worker_of or info.node_id, []).append(info)
    return [_whole_node(name, infos) for name, infos in groups.items()]


def _whole_node(name: str, infos: list[NodeInfo]) -> NodeInfo:
    infos = [info for info in infos if info.worker_of] or infos  # it may have been single before
    first = infos[0]
    if not first.worker_of:
        return first
    alive = [info for info in infos if info.healthy]
    counted = alive or infos

    def added(of: Callable[[NodeInfo], Any], fields: Iterable[str]) -> dict[str, int]:
        return {field: sum(getattr(of(info), field) for info in counted) for field in fields}

    stages = ("max_init_workers", "max_run_workers", "max_postrun_workers", "sessions")
    return msgspec.structs.replace(
        first,
        node_id=name,
        gateway_url=first.gateway_url.rpartition("/workers/")[0],
        healthy=bool(alive),
        draining=all(info.draining for info in counted),
        last_heartbeat=max(info.last_heartbeat for info in infos),
        metrics=NodeLoad(**added(lambda info: info.metrics, NodeLoad.__struct_fields__)),
        worker_of="",
        workers=len(alive),
        **added(lambda info: info, stages),
    )


def task_summary(task: TaskRequest, state: TaskState, sessions: Sequence[SessionRecord]) -> dict[str, Any]:
    """A task in short, without what only its results say."""
    return {
        "task_id": task.task_id,
        "status": state,
        "harness": task.agent.harness or task.agent.import_path,
        "model": task.agent.model_name,
        "num_samples": task.num_samples,
        "completed_sessions": sum(record.state in TERMINAL_STATES for record in sessions),
        "errored_sessions": sum(record.state in ("ERROR", "TIMEOUT") for record in sessions),
        "created_at": min((record.created_at for record in sessions), default=0.0),
        "updated_at": max((record.updated_at for record in sessions), default=0.0),
    }


def results_summary(results: Sequence[SessionResult]) -> dict[str, Any]:
    """Means over the sessions of a task that have ended; ``None`` where there is nothing to take a mean of."""
    metadata = [result.trajectory.metadata for result in results]
    rewards = [reward for each in metadata if (reward := _reward(each)) is not None]
    return {
        "mean_reward": _mean(rewards),
        "mean_traces": _mean([each.get("trace_count", 0) for each in metadata]),
        "mean_completions": _mean([each.get("record_count", 0) for each in metadata]),
    }


def session_summary(record: SessionRecord, result: SessionResult | None = None) -> dict[str, Any]:
    """A session in short; with what its result says, once it has one."""
    summary: dict[str, Any] = {
        "session_id": record.session_id,
        "task_id": record.task_id,
        "sample_index": record.sample_index,
        "attempt": record.attempt,
        "status": record.state,
        "error": record.error,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "metadata": record.metadata,
    }
    if result is not None:
        told = wire_result(result, record)
        summary |= {"node_id": told.node_id, "timing": told.timing, "reward": _reward(told.trajectory.metadata)}
    return summary


def _reward(metadata: dict[str, Any]) -> float | None:
    """What the evaluator gave the session: for the whole, or on average over its traces."""
    evaluation = metadata.get("evaluation") or {}
    outcome: float | None = evaluation.get("outcome_reward")
    return outcome if outcome is not None else _mean(evaluation.get("trace_rewards") or [])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
