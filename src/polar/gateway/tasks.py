"""Tasks on one node: their sessions made, or taken up again where an earlier run was cut off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import cache

import msgspec

from polar.config import session_id
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES
from polar.contract.task import TaskRequest
from polar.evaluators import make_evaluator
from polar.gateway.lifecycle import Pools, run_sessions
from polar.gateway.node import Node
from polar.gateway.session_run import OnChange, Parts, SessionRun
from polar.harnesses import Endpoint, make_harness
from polar.runtimes import backend, remove_leftovers
from polar.store.base import SessionRecord, StoreConflict
from polar.store.ledger import MAX_ATTEMPTS
from polar.trajectories import make_builder

log = logging.getLogger("polar.harnesses")

_NOWHERE = Endpoint(url="http://127.0.0.1:1", api_key="none", model="none", context_length=8192)
"""Stands for the endpoint where a plan is made only to see whether it can be made."""


async def make_parts(task: TaskRequest, *, sandbox: str = "bubblewrap", allow_import: bool = False) -> Parts:
    """Everything a task names, looked up before anything starts.

    Raises:
        UsageError: a part is unknown, not installed or does not work on this host.
    """
    harness = make_harness(task.agent, allow_import=allow_import)
    installed = harness.find()
    if installed is None:
        raise UsageError(f"harness {harness.name} is not installed: {harness.install_hint}")
    if harness.pinned not in (None, installed.version):
        _say_version(harness.name, installed.version, harness.pinned, harness.install_hint)
    make_builder(task.builder, allow_import)
    evaluator = make_evaluator(task.evaluator, allow_import=allow_import)
    harness.plan(task.agent, task.instruction, _NOWHERE, installed)
    runtimes = backend(task.runtime.backend, sandbox=sandbox)
    runtimes.check(task.runtime)
    probe = await runtimes.probe()
    if not probe.ok:
        raise UsageError(f"sandbox: {probe.detail}{f': {probe.fix}' if probe.fix else ''}")
    return Parts(
        harness=harness, installed=installed, runtimes=runtimes, evaluator=evaluator, allow_import=allow_import
    )


@cache  # once for each
def _say_version(name: str, version: str, pinned: str, hint: str) -> None:
    log.warning("harness %s is version %s, and %s is the one that was tested: %s", name, version, pinned, hint)


async def run_tasks(
    node: Node,
    tasks: Sequence[tuple[TaskRequest, Parts]],
    *,
    pools: Pools,
    on_change: OnChange = lambda _: None,
) -> None:
    """Run what is left of these tasks: sessions that ended before stay as they are, sessions that were cut
    off are begun again as a new attempt.

    Raises:
        UsageError: the store has another task of the same id.
    """
    await asyncio.to_thread(remove_leftovers, node.folder)
    runs: list[SessionRun] = []
    for task, parts in tasks:
        try:
            await node.store.put_task(task)
        except StoreConflict:
            raise UsageError(
                f"task {task.task_id!r} was run here before with other settings (another file, another -n): "
                "take another --out or another task_id"
            ) from None
        runs += [SessionRun(node, task, record, parts, on_change) for record in await _open_sessions(node, task)]
        for record in await node.store.sessions(task.task_id):
            on_change(record)
    exhausted = [run for run in runs if run.record.attempt > MAX_ATTEMPTS]
    for run in exhausted:
        run.fail(f"attempts exhausted: cut off {MAX_ATTEMPTS} times")
        await run.finish()
    await run_sessions([run for run in runs if run not in exhausted], pools)


async def _open_sessions(node: Node, task: TaskRequest) -> list[SessionRecord]:
    """The sessions of a task that have not ended, registered on disk; each under a fresh attempt."""
    known = {record.session_id: record for record in await node.store.sessions(task.task_id)}
    now = time.time()
    records: list[SessionRecord] = []
    for sample in range(task.num_samples):
        name = session_id(task, sample)
        earlier = known.get(name)
        if earlier is None:
            record = SessionRecord(
                session_id=name, task_id=task.task_id, sample_index=sample, created_at=now, updated_at=now
            )
        elif earlier.state in TERMINAL_STATES:
            continue
        else:
            record = msgspec.structs.replace(
                earlier, attempt=earlier.attempt + 1, state="REGISTERED", updated_at=now, error=None
            )
        await node.store.put_session(record)
        records.append(record)
    return records
