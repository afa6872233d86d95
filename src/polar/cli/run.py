"""``polar run``: tasks here, in one process, with progress; results into a folder."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import uvloop

from polar.cli import options, screen
from polar.config import load_task
from polar.contract.errors import Interrupted, UsageError
from polar.contract.task import TaskRequest
from polar.engines import make_engine
from polar.gateway.lifecycle import Pools
from polar.gateway.node import Node
from polar.gateway.session_run import Parts
from polar.gateway.tasks import make_parts, run_tasks
from polar.results import DATABASE, require_writable, write_folder
from polar.store import open_store


def run(
    tasks: Annotated[list[Path], typer.Argument(metavar="TASK.yaml...", help="Task files.")],
    samples: Annotated[int | None, typer.Option("--samples", "-n", min=1, help="Samples of each task.")] = None,
    engine: options.EngineKind = "local",
    engine_url: options.EngineURL = None,
    model: options.Model = None,
    mode: options.Mode = None,
    tokenizer: options.Tokenizer = None,
    buffer_replies: options.BufferReplies = False,
    allow_missing_token_ids: options.AllowMissingTokenIds = False,
    builder: Annotated[str | None, typer.Option("--builder", help="prefix_merging or per_request.")] = None,
    out: options.Out = None,
    store: Annotated[str | None, typer.Option("--store", help="Store URL; by default in the results folder.")] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Sessions that run at once.")] = 4,
    no_sandbox: options.NoSandbox = False,
    allow_import: options.AllowImport = False,
    as_json: options.JSONOutput = False,
) -> None:
    """Run tasks here, in one process. Run again with the same --out to go on where it was cut off."""
    if allow_import:
        sys.path.insert(0, str(Path.cwd()))  # where a user keeps classes of their own
    requests = [load_task(path, samples, builder) for path in tasks]
    if len({task.task_id for task in requests}) < len(requests):
        raise UsageError("two of these tasks have the same task_id")
    folder = out or Path("results") / f"{requests[0].task_id}-{time.strftime('%Y%m%d-%H%M%S')}"
    for task in requests:
        if task.callback_url:
            screen.err.print(f"{task.task_id}: callback_url is for the service; polar run writes a folder")
    settings = Settings(
        engine=lambda: make_engine(
            engine,
            url=engine_url,
            model=model,
            mode=mode,
            tokenizer=tokenizer,
            require_token_ids=not allow_missing_token_ids,
            progress=screen.err.print,
        ),
        folder=folder,
        files={task.task_id: path for task, path in zip(requests, tasks, strict=True)},
        store=store,
        sandbox="none" if no_sandbox else "bubblewrap",
        allow_import=allow_import,
        pools=Pools(run=workers, init=min(workers, 4)),
        quiet=as_json,
        buffer_replies=buffer_replies,
        require_token_ids=not allow_missing_token_ids,
    )
    report = run_to_end(requests, settings)
    if as_json:
        print(json.dumps({"folder": str(folder), **report}))
    else:
        screen.print_report(report, folder)
    if report["sessions"]["unfinished"] or report["sessions"].get("ERROR"):
        raise typer.Exit(1)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How to run tasks into a folder. ``engine`` makes the engine when everything else is known to be right;
    ``files`` are those that tasks came from, by task id."""

    engine: Any
    folder: Path
    files: dict[str, Path] = {}
    store: str | None = None
    sandbox: str = "bubblewrap"
    allow_import: bool = False
    pools: Pools = Pools()
    quiet: bool = False
    buffer_replies: bool = False
    require_token_ids: bool = True


def run_to_end(requests: list[TaskRequest], settings: Settings) -> dict[str, Any]:
    """``run_folder`` on an event loop of its own; Ctrl-C and SIGTERM end it in order.

    Raises:
        Interrupted: what had not ended goes on when it is run again.
    """
    try:
        report: dict[str, Any] = uvloop.run(_until_signalled(run_folder(requests, settings)))
        return report
    except (KeyboardInterrupt, asyncio.CancelledError) as error:
        by = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        raise Interrupted(f"interrupted: run it again with --out {settings.folder} to go on", by) from None


async def _until_signalled(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


async def run_folder(requests: list[TaskRequest], settings: Settings) -> dict[str, Any]:
    """Run tasks and write their results folder; the report.

    Raises:
        UsageError: something a task needs is not there; nothing was started.
    """
    folder = settings.folder
    parts = [(task, await _parts(task, settings)) for task in requests]
    engine = await asyncio.to_thread(settings.engine)
    require_writable(folder)
    store = open_store(settings.store or str(folder / DATABASE))
    node = Node(
        engine,
        store,
        folder,
        buffer_replies=settings.buffer_replies,
        require_token_ids=settings.require_token_ids,
    )
    await node.start()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with screen.Progress(requests, quiet=settings.quiet) as progress:
            await run_tasks(node, parts, pools=settings.pools, on_change=progress.update)
        return await write_folder(store, folder, allow_import=settings.allow_import)
    finally:
        await node.close()


async def _parts(task: TaskRequest, settings: Settings) -> Parts:
    try:
        return await make_parts(task, sandbox=settings.sandbox, allow_import=settings.allow_import)
    except UsageError as error:
        file = settings.files.get(task.task_id)
        raise error if file is None else UsageError(f"{file}: {error}") from None
