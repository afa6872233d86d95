"""A results folder: ``traces.parquet``, ``results.jsonl``, ``report.json``, ``polar.db`` and ``sessions/``.

The store is the only source; the other files are views of it, written anew each time and whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult, Trajectory
from polar.contract.task import BuilderSpec, TaskRequest
from polar.store import open_store
from polar.store.base import Store
from polar.store.lock import FileLock
from polar.trajectories.assemble import assemble, record_evaluation, unbuilt
from polar.trajectories.export import export
from polar.trajectories.rewards import assign
from polar.trajectories.text_only import text_traces
from polar.trajectories.weights import WeightSummary

T = TypeVar("T")

DATABASE = "polar.db"


def database(path: Path) -> Path:
    """The database of a results folder, or the file itself.

    Raises:
        UsageError: there is none.
    """
    found = path / DATABASE if path.is_dir() else path
    if not found.is_file():
        raise UsageError(f"{path} is no results folder: there is no {DATABASE} in it")
    return found


def cut_off(path: Path) -> bool:
    """Whether what wrote this folder was killed, and nothing has written it since."""
    return FileLock(database(path)).left_by_the_dead()


def require_writable(path: Path) -> None:
    """See that a results folder can be made or written at ``path``, without making it.

    Raises:
        UsageError: it can't.
    """
    there = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.lexists(each))
    if not there.is_dir():
        raise UsageError(f"{path} can't be a results folder: {there} is a file: take another --out")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{path} can't be a results folder: {there} can't be written: take another --out")


async def rebuild(
    store: Store,
    result: SessionResult,
    builder: BuilderSpec | None = None,
    *,
    allow_import: bool = False,
    with_text: bool = False,
) -> SessionResult:
    """A stored result with its traces, built afresh from its completions.

    Args:
        builder: another builder than the task's own. Rewards by trace do not carry over to it.
        with_text: after those, the traces of calls without token ids (see ``polar.trajectories.text_only``).
    """
    task = await store.task(result.task_id)
    stored = result.trajectory
    completions = await store.completions(result.session_id, result.attempt)
    # A bare capture session has no task; its builder is the one that it was stored with.
    spec = builder or (
        task.builder if task else BuilderSpec(strategy=stored.metadata.get("builder", "prefix_merging"))
    )
    provenance = stored.metadata.get("provenance") or {}
    try:
        trajectory = await asyncio.to_thread(
            assemble,
            completions,
            spec,
            provenance=provenance,
            policy_version=result.metadata.get("policy_version"),
            allow_import=allow_import,
        )
    except UsageError:
        raise
    except Exception as error:
        # A builder's fault with one session is that session's error.
        trajectory = unbuilt(completions, spec, provenance)
        result.status, result.error = "ERROR", result.error or f"builder {spec.strategy}: {error}"
        stored.status, stored.error = result.status, result.error
    trajectory.status, trajectory.error = stored.status, stored.error
    if "agent_result" in stored.metadata:
        trajectory.metadata["agent_result"] = stored.metadata["agent_result"]
    evaluation = dict(stored.metadata.get("evaluation") or {})
    by_trace = evaluation.get("trace_rewards")
    if by_trace is not None and len(by_trace) != len(trajectory.traces):
        by_trace = None
    record_evaluation(
        trajectory,
        outcome_reward=evaluation.get("outcome_reward"),
        trace_rewards=by_trace,
        evaluation=evaluation,
    )
    if with_text:
        more = text_traces(completions)
        assign(more, evaluation.get("outcome_reward"))
        trajectory.traces += more
    result.trajectory = trajectory
    return result


async def results_so_far(store: Store) -> list[SessionResult]:
    """What the newest attempt of each session has come to, without traces. One that has not ended (it may be
    running, or was cut off) is an error that says where it stands."""
    stored = {result.session_id: result for result in await store.results()}
    found: list[SessionResult] = []
    for record in await store.sessions():
        result = stored.get(record.session_id)
        if result is None or result.attempt != record.attempt:
            error = f"not ended: {record.state}"
            result = SessionResult(
                session_id=record.session_id,
                task_id=record.task_id,
                attempt=record.attempt,
                status="ERROR",
                error=error,
                trajectory=Trajectory(status="ERROR", error=error),
            )
        found.append(result)
    return found


async def stream_results(
    store: Store,
    pending: Sequence[SessionResult],
    consume: Callable[[Iterator[SessionResult]], T],
    builder: BuilderSpec | None = None,
    *,
    allow_import: bool = False,
    with_text: bool = False,
) -> T:
    """Call ``consume`` in a thread with an iterator over these results, rebuilt (see ``rebuild``) one at a time."""
    loop = asyncio.get_running_loop()

    def results() -> Iterator[SessionResult]:
        for result in pending:
            work = rebuild(store, result, builder, allow_import=allow_import, with_text=with_text)
            yield asyncio.run_coroutine_threadsafe(work, loop).result()
            result.trajectory.traces = []

    return await asyncio.to_thread(consume, results())


async def write_folder(store: Store, folder: Path, *, allow_import: bool = False) -> dict[str, Any]:
    """Write a folder's views of its store: of the sessions that have ended.

    Returns:
        The report, as in ``report.json``.
    """
    report = Report()

    def consume(results: Iterator[SessionResult]) -> None:
        for left in folder.glob(".traces.parquet.*.partial"):  # by a run that was killed while it wrote
            left.unlink(missing_ok=True)
        lines = folder / "results.jsonl.part"
        with lines.open("wb") as file:

            def written() -> Iterator[SessionResult]:
                for result in results:
                    file.write(to_json(result) + b"\n")
                    report.add(result)
                    yield result

            export(written(), folder / "traces.parquet", "parquet")
        os.replace(lines, folder / "results.jsonl")

    sessions = await store.sessions()
    ended = {record.session_id for record in sessions if record.state in TERMINAL_STATES}
    pending = [result for result in await results_so_far(store) if result.session_id in ended]
    await stream_results(store, pending, consume, allow_import=allow_import)
    for record in sessions:
        for attempt in range(1, record.attempt):
            report.cut_off += len(await store.completions(record.session_id, attempt))
    body = report.body(await store.tasks(), unfinished=len(sessions) - report.sessions)
    part = folder / "report.json.part"
    part.write_text(json.dumps(body, indent=2) + "\n")
    os.replace(part, folder / "report.json")
    return body


class Report:
    """Sums over sessions, added one at a time."""

    def __init__(self) -> None:
        self.sessions = 0
        self.cut_off = 0
        """Calls of attempts that were cut off and begun again: kept in the store, in no trace."""
        self._status: Counter[str] = Counter()
        self._fates: Counter[str] = Counter()
        self._splits: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._warnings: Counter[str] = Counter()
        self._weights = WeightSummary()
        self._rewards: list[float] = []
        self._by_task: dict[str, list[float | None]] = {}
        self._timing: dict[str, list[float]] = {}
        self._traces = self._tokens = self._trained = 0

    def add(self, result: SessionResult) -> None:
        """Count one result, with its traces."""
        metadata = result.trajectory.metadata
        reconstruction = metadata["reconstruction"]
        self.sessions += 1
        self._status[result.status] += 1
        for fate, names in reconstruction["completions"].items():
            self._fates[fate] += len(names)
        for split in reconstruction["splits"]:
            self._splits[split["reason"]] += 1
        if result.error:
            self._errors[result.error] += 1
        reward = (metadata.get("evaluation") or {}).get("outcome_reward")
        self._by_task.setdefault(result.task_id, []).append(reward)
        if reward is not None:
            self._rewards.append(reward)
        for stage, seconds in result.timing.items():
            self._timing.setdefault(stage, []).append(seconds)
        self._traces += len(result.trajectory.traces)
        self._trained += sum(len(trace.completion_ids) for trace in result.trajectory.traces)
        self._tokens += reconstruction["tokens_trained"]
        self._warnings.update(metadata.get("warnings") or ())
        for trace in result.trajectory.traces:
            self._weights.add(trace)

    def body(self, tasks: list[TaskRequest], *, unfinished: int) -> dict[str, Any]:
        """The report as plain data. Times are mean seconds by stage; errors and warnings count sessions."""
        requested = {task.task_id: task.num_samples for task in tasks}
        none: dict[str, list[float | None]] = {name: [] for name in requested}
        return {
            "tasks": {
                name: {"requested": requested.get(name, len(rewards)), "rewards": rewards}
                for name, rewards in (none | self._by_task).items()
            },
            "sessions": {"ended": self.sessions, "unfinished": unfinished, **self._status},
            "mean_reward": statistics.fmean(self._rewards) if self._rewards else None,
            "completions": {**self._fates, **({"cut_off": self.cut_off} if self.cut_off else {})},
            "traces": self._traces,
            "merge_factor": self._trained / self._traces if self._traces else 0.0,
            "tokens_trained": self._tokens,
            "weights": self._weights.body(),
            "splits": dict(self._splits),
            "seconds": {stage: round(statistics.fmean(each), 3) for stage, each in self._timing.items()},
            "errors": dict(self._errors),
            "warnings": dict(self._warnings),
        }


async def open_folder(path: Path) -> Store:
    """The store of a results folder, for reading, beside a run that may be writing it."""
    store = open_store(str(database(path)), read_only=True)
    await store.open()
    return store
