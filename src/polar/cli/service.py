"""``polar submit``, ``status``, ``results``, ``cancel``, ``nodes``, ``drain``: the rollout service at a terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer
from rich.live import Live
from rich.text import Text

from polar.cli import options, screen
from polar.cli.screen import Table
from polar.client import RolloutClient, ServiceError
from polar.config import load_task
from polar.contract.arrays import to_json, to_plain
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES
from polar.contract.rollout import NodeInfo
from polar.contract.task import TaskRequest
from polar.results import require_writable
from polar.rollout.wire import WireTaskStatus

T = TypeVar("T")

Server = Annotated[
    str | None, typer.Option("--server", help="The rollout server (POLAR_SERVER; http://127.0.0.1:8080).")
]
TaskId = Annotated[str, typer.Argument(metavar="ID", help="A task's id.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show how it goes on.")]
REFRESH = 1.0
MISTAKEN = 422
"""The status of an answer to a task with a mistake in it."""


def submit(
    tasks: Annotated[list[Path], typer.Argument(metavar="TASK.yaml...", help="Task files.")],
    samples: Annotated[int | None, typer.Option("-n", "--samples", help="Sessions of each task.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until they have ended, with progress.")] = False,
    server: Server = None,
    as_json: options.JSONOutput = False,
) -> None:
    """Post tasks to the rollout service."""
    requests = [load_task(path, samples) for path in tasks]

    async def work(client: RolloutClient) -> list[WireTaskStatus]:
        for path, request in zip(tasks, requests, strict=True):
            await _submit(client, request, path)
        names = [request.task_id for request in requests]
        if wait:
            await _watch_tasks(client, names, quiet=as_json)
        return [await client.status(name) for name in names]

    statuses = _with_client(server, work)
    _print_statuses(statuses, as_json)
    ended = [result.status for status in statuses for result in status.results] if wait else []
    if any(status.status == "cancelled" for status in statuses) or any(each != "COMPLETED" for each in ended):
        raise typer.Exit(1)


def status(
    task_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A task's id; the service if left out.")
    ] = None,
    watch: Watch = False,
    server: Server = None,
    as_json: options.JSONOutput = False,
) -> None:
    """How a task stands, or the whole service."""

    async def work(client: RolloutClient) -> Any:
        if task_id is None:
            if watch:
                await _refresh(lambda: _service_table(client))
            return await client.get("/rollout/status")
        if watch:
            await _watch_tasks(client, [task_id], quiet=as_json)
        found = await client.status(task_id)
        if found.status == "running" and (why := _nobody_takes(await client.nodes())):
            screen.err.print(why)
        return found

    found = _with_client(server, work)
    if isinstance(found, WireTaskStatus):
        _print_statuses([found], as_json)
    else:
        _print_service(found, as_json)


def results(
    task_id: TaskId,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the traces; if not, a table.")] = None,
    to: Annotated[Literal["parquet", "jsonl"], typer.Option("--to", help="parquet or jsonl.")] = "parquet",
    server: Server = None,
    as_json: options.JSONOutput = False,
) -> None:
    """The results of a task so far: one line a session, or its traces into a file."""
    if out is not None:
        require_writable(out.parent)
        size = _with_client(server, lambda client: client.traces(task_id, to, out))
        screen.err.print(f"{size} bytes in {out}")
        return
    detail = "full" if as_json else "summary"
    found = _with_client(server, lambda client: client.status(task_id, results=detail))
    if as_json:
        for result in found.results:
            print(to_json(result).decode())
    else:
        _print_results(found)


def cancel(task_id: TaskId, server: Server = None, as_json: options.JSONOutput = False) -> None:
    """End a task now; the traces of what it had captured are kept."""
    _print_statuses([_with_client(server, lambda client: client.cancel(task_id))], as_json)


def nodes(watch: Watch = False, server: Server = None, as_json: options.JSONOutput = False) -> None:
    """The gateway nodes: what each has room for and what it does."""

    async def work(client: RolloutClient) -> Any:
        if watch:
            await _refresh(lambda: _nodes_table(client))
        return await client.nodes()

    found = _with_client(server, work)
    if as_json:
        print(json.dumps(to_plain(found)))
    else:
        screen.out.print(_table_of_nodes(found))


def drain(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="A node's id.")],
    server: Server = None,
    as_json: options.JSONOutput = False,
) -> None:
    """Let a node take no more sessions; what runs there ends there."""

    async def work(client: RolloutClient) -> NodeInfo:
        try:
            return await client.drain(node_id)
        except ServiceError as error:
            if error.status != 404:
                raise
            names = ", ".join(node.node_id for node in await client.nodes())
            raise UsageError(f"there is no node {node_id}: there {f'are {names}' if names else 'is none'}") from None

    node = _with_client(server, work)
    if as_json:
        print(json.dumps(to_plain(node)))
    else:
        screen.out.print(f"{node.node_id} drains: {node.sessions} sessions left; restart it to undo that")


async def _submit(client: RolloutClient, request: TaskRequest, path: Path) -> None:
    """Hand it in, and say so if it was there before: then there is no run that just begins.

    Raises:
        UsageError: the service finds a mistake in the task; the message names its file.
    """
    try:
        await client.status(request.task_id, results="none")
        known = True
    except ServiceError as error:
        if error.status != 404:
            raise
        known = False
    try:
        await client.submit(request)
    except ServiceError as error:
        if error.status != MISTAKEN:
            raise
        raise UsageError(f"{path}: {error}") from None
    if known:
        screen.err.print(f"{request.task_id} was handed in before: nothing new was begun")


# ---- what is shown ---------------------------------------------------------------------------------------


def _with_client(server: str | None, work: Callable[[RolloutClient], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        async with RolloutClient(server, patience=5.0) as client:
            return await work(client)

    return asyncio.run(run())


async def _watch_tasks(client: RolloutClient, names: list[str], *, quiet: bool) -> None:
    """Progress until every task has ended: live on a terminal, with a line for each session that fails; elsewhere
    with a line for each that ends."""
    live = Live(console=screen.err, auto_refresh=False, transient=True)
    shown = screen.err.is_terminal and not quiet
    ended: dict[str, int] = {}
    told: set[str] = set()
    why: str | None = None
    with live if shown else nullcontext():
        left = names
        while left:
            wait = REFRESH if len(names) == 1 else 0.0
            stati = [await client.status(name, results="none", wait=wait) for name in left]
            left = [each.task_id for each in stati if each.status == "running"]
            for each in stati if not quiet else ():
                if each.completed_sessions > ended.get(each.task_id, 0):
                    ended[each.task_id] = each.completed_sessions
                    await _say_ended(client, each.task_id, told, failed_only=shown)
            if shown:
                live.update(await _tasks_table(client, names), refresh=True)
            before, why = why, _nobody_takes(await client.nodes()) if left else None
            if why and why != before:
                screen.err.print(why)
            if left and len(names) > 1:
                await asyncio.sleep(REFRESH)


async def _say_ended(client: RolloutClient, task_id: str, told: set[str], *, failed_only: bool) -> None:
    """A line for each session that has ended and was not told of before; ``told`` has those, and takes these."""
    for each in (await client.get(f"/tasks/{task_id}/sessions"))["sessions"]:
        name, state = each["session_id"], each["status"]
        if state not in TERMINAL_STATES or name in told:
            continue
        told.add(name)
        if state != "COMPLETED" or not failed_only:
            screen.err.print(f"{name} {state}" + (f": {each['error']}" if each["error"] else ""))


def _nobody_takes(nodes: list[NodeInfo]) -> str | None:
    """Why no session begins, and what to do, if no node takes any."""
    if any(node.healthy and not node.draining for node in nodes):
        return None
    away = [node.node_id for node in nodes if not node.healthy]
    draining = [node.node_id for node in nodes if node.healthy]
    reasons = []
    if draining:
        reasons.append(f"{_are(draining)} draining; restart {_them(draining)} to undo that")
    if away:
        reasons.append(f"{_are(away)} away; start {_them(away)} again")
    return f"no node takes sessions: {'; '.join(reasons) or 'there is none; start one with polar serve'}"


def _are(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"


async def _tasks_table(client: RolloutClient, names: list[str]) -> Table:
    table = Table("task")
    for head in screen.STAGES.values():
        table.add_column(head, justify="right")
    for name in names:
        sessions = (await client.get(f"/tasks/{name}/sessions"))["sessions"]
        counts = Counter(screen.FOLDED.get(each["status"], each["status"]) for each in sessions)
        table.add_row(name, *(str(counts[stage] or "·") for stage in screen.STAGES))
    return table


async def _refresh(make: Callable[[], Coroutine[Any, Any, Table]]) -> None:
    with Live(console=screen.out, auto_refresh=False) as live:
        while True:
            live.update(await make(), refresh=True)
            await asyncio.sleep(REFRESH)


async def _nodes_table(client: RolloutClient) -> Table:
    return _table_of_nodes(await client.nodes())


async def _service_table(client: RolloutClient) -> Table:
    return _table_of_service(await client.get("/rollout/status"))


def _print_statuses(statuses: list[WireTaskStatus], as_json: bool) -> None:
    if as_json:
        print(json.dumps([to_plain(status) for status in statuses]))
        return
    table = Table("task", "status", "ended", "rewards")
    for each in statuses:
        rewards = " ".join(_reward(result.trajectory.metadata) for result in each.results)
        failed = Counter(result.status.lower() for result in each.results if result.status != "COMPLETED")
        status = ", ".join([each.status, *(f"{n} {what}{'s' if n > 1 else ''}" for what, n in failed.items())])
        table.add_row(each.task_id, status, f"{each.completed_sessions} of {each.total_sessions}", rewards or "-")
    screen.out.print(table)


def _print_results(status: WireTaskStatus) -> None:
    table = Table("session", "status", "reward", "traces", "seconds", "error")
    for result in status.results:
        seconds = (result.timing.init_ms + result.timing.run_ms + result.timing.postrun_ms) / 1000
        metadata = result.trajectory.metadata
        traces = str(metadata.get("trace_count", len(result.trajectory.traces)))
        row = (result.session_id, result.status, _reward(metadata), traces, f"{seconds:.1f}", result.error or "")
        table.add_row(*(Text(cell) for cell in row))
    screen.out.print(table)


def _reward(metadata: dict[str, Any]) -> str:
    reward = (metadata.get("evaluation") or {}).get("outcome_reward")
    return "-" if reward is None else f"{reward:g}"


def _table_of_nodes(found: list[Any]) -> Table:
    table = Table("node", "workers", "state", "init", "ready", "run", "post", "sessions", "address", "heard")
    for node in found:
        state = "draining" if node.draining else "healthy" if node.healthy else "away"
        load = node.metrics
        table.add_row(
            node.node_id,
            str(node.workers),
            state,
            f"{load.init_inflight}/{node.max_init_workers}",
            str(load.ready_depth),
            f"{load.run_inflight}/{node.max_run_workers}",
            f"{load.postrun_inflight}/{node.max_postrun_workers}",
            str(node.sessions),
            node.gateway_url,
            f"{max(0.0, time.time() - node.last_heartbeat):.0f} s ago",
        )
    return table


def _print_service(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
    else:
        screen.out.print(_table_of_service(found))


def _table_of_service(found: dict[str, Any]) -> Table:
    table = Table()
    why = _nobody_takes(msgspec.convert(found["nodes"]["nodes"], list[NodeInfo]))
    pipeline, nodes = found["pipeline"], found["nodes"]
    lines = {
        "polar": found["service"]["polar"],
        "tasks": _counts(Counter(found["tasks"].values())),
        "sessions": _counts(pipeline["sessions"]),
        "nodes": f"{nodes['total']}, of which {nodes['healthy']} healthy, {nodes['draining']} draining",
        **({"": why} if why else {}),
        **{f"callback of {each['task_id']}": each["error"] for each in pipeline["callbacks_failed"]},
    }
    for name, value in lines.items():
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {what.lower()}" for what, count in counts.items() if count) or "none"
