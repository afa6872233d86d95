"""``polar capture -- CMD``: any command with its model calls captured; no task file, no server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import uvloop

import polar
from polar.cli import options, screen
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.task import AgentSpec, BuilderSpec, CustomShell, TaskRequest
from polar.engines import make_engine
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.harnesses import standard_env
from polar.harnesses.base import Endpoint
from polar.results import DATABASE, require_writable, write_folder
from polar.store import open_store
from polar.store.base import SessionRecord
from polar.trajectories import make_builder
from polar.trajectories.assemble import assemble, record_evaluation


def capture(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.")],
    engine: options.EngineKind = "local",
    engine_url: options.EngineURL = None,
    model: options.Model = None,
    mode: options.Mode = None,
    builder: Annotated[str, typer.Option("--builder", help="prefix_merging or per_request.")] = "prefix_merging",
    out: options.Out = None,
    report: Annotated[str | None, typer.Option("--report", help="'-' prints the report to stderr.")] = None,
) -> None:
    """Run a command with its model calls captured. Its exit code is this command's own."""
    if report not in (None, "-"):
        raise UsageError("--report takes '-' (stderr); the results folder always has report.json")
    if shutil.which(command[0]) is None:
        screen.err.print(f"polar: {command[0]}: command not found")
        raise typer.Exit(127)
    name = f"capture-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = out or Path("results") / name
    require_writable(folder)
    spec = BuilderSpec(strategy=builder)
    make_builder(spec)
    task = TaskRequest(
        task_id=name,
        instruction=shlex.join(command),
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command=shlex.join(command))),
        builder=spec,
    )
    made = make_engine(engine, url=engine_url, model=model, mode=mode, progress=screen.err.print)
    code, body = uvloop.run(_capture(Node(made, open_store(str(folder / DATABASE)), folder), task, command))
    if sys.stderr.isatty():
        calls = sum(body["completions"].values())
        screen.err.print(f"polar: {calls} calls captured in {folder}")
    if report == "-":
        screen.err.print(json.dumps({"folder": str(folder), **body}, indent=2))
    raise typer.Exit(code)


async def _capture(node: Node, task: TaskRequest, command: Sequence[str]) -> tuple[int, dict[str, Any]]:
    await node.start()
    try:
        await _end_those_cut_off(node)
        now = time.time()
        record = SessionRecord(
            session_id=task.task_id,
            task_id=task.task_id,
            sample_index=0,
            state="RUNNING",
            created_at=now,
            updated_at=now,
        )
        await node.store.put_task(task)
        await node.store.put_session(record)
        session = LiveSession(session_id=record.session_id)
        node.gateway.open(session)
        info = node.engine.info
        endpoint = Endpoint(node.server.url, session.key, info.model, node.context_length)
        folder = node.folder.resolve() / "session"
        for part in ("artifacts", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        env = standard_env(endpoint, session_id=record.session_id, task_id=task.task_id, folder=str(folder))
        code = await _run(command, env)
        await node.gateway.close(session)
        error = session.broken or (f"the command ended with exit code {code}" if code else None)
        if not await node.store.completions(record.session_id):
            error = "no model call: the command never reached the model"
            screen.err.print(f"polar: {error} (it must use the base URL of its environment, such as OPENAI_BASE_URL)")
        await _finish(node, task, record, error)
        return code, await write_folder(node.store, node.folder)
    finally:
        await node.close()


async def _run(command: Sequence[str], env: dict[str, str]) -> int:
    """Run the command on our own stdin, stdout and stderr; a signal sent to us is the command's to handle."""
    loop = asyncio.get_running_loop()
    # The terminal sends Ctrl-C to the command as well, so it is enough not to die of it. A signal that comes
    # while the command starts waits for it.
    asked = asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    loop.add_signal_handler(signal.SIGTERM, asked.set)
    try:
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **env})
        loop.add_signal_handler(signal.SIGTERM, process.terminate)
        if asked.is_set():
            process.terminate()
        code = await process.wait()
    except OSError as error:
        screen.err.print(f"polar: {command[0]}: {error.strerror}")
        return 126
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
    return code if code >= 0 else 128 - code


async def _end_those_cut_off(node: Node) -> None:
    """A capture that was killed has ended all the same, with what it had captured by then."""
    for record in await node.store.sessions():
        task = await node.store.task(record.task_id)
        if task and record.session_id == task.task_id and record.state not in TERMINAL_STATES:
            await _finish(node, task, record, "cut off: polar capture was killed before the command ended")


async def _finish(node: Node, task: TaskRequest, record: SessionRecord, error: str | None) -> None:
    completions = await node.store.completions(record.session_id)
    status: Literal["COMPLETED", "ERROR"] = "ERROR" if error else "COMPLETED"
    provenance = {
        "polar": polar.__version__,
        "engine": node.engine.info.kind,
        "engine_version": node.engine.info.version,
        "model": node.engine.info.model,
        "harness": "capture",
        "started_at": record.created_at,
        "ended_at": time.time(),
    }
    trajectory = assemble(completions, task.builder, status=status, error=error, provenance=provenance)
    record_evaluation(trajectory)
    ended = SessionRecord(
        session_id=record.session_id,
        task_id=record.task_id,
        sample_index=0,
        state=status,
        created_at=record.created_at,
        updated_at=time.time(),
        error=error,
    )
    result = SessionResult(
        session_id=record.session_id,
        task_id=record.task_id,
        attempt=record.attempt,
        status=status,
        trajectory=trajectory,
        timing={"run": round(time.time() - record.created_at, 3)},
        error=error,
    )
    await node.store.finish_session(ended, result)
