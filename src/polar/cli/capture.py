"""``polar capture -- CMD``: any command with its model calls captured; no task file, no server."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from polar.cli import options, screen
from polar.contract.errors import UsageError
from polar.contract.task import BuilderSpec
from polar.engines import make_engine
from polar.gateway.captures import Captures
from polar.gateway.node import Node
from polar.harnesses import standard_env
from polar.harnesses.base import Endpoint
from polar.results import DATABASE, require_writable, write_folder
from polar.store import open_store
from polar.trajectories import make_builder


def capture(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command and its arguments.")],
    engine: options.EngineKind = "local",
    engine_url: options.EngineURL = None,
    model: options.Model = None,
    mode: options.Mode = None,
    tokenizer: options.Tokenizer = None,
    buffer_replies: options.BufferReplies = False,
    allow_missing_token_ids: options.AllowMissingTokenIds = False,
    builder: Annotated[str, typer.Option("--builder", help="prefix_merging or per_request.")] = "prefix_merging",
    out: options.Out = None,
    report: Annotated[str | None, typer.Option("--report", help="'-' prints the report to stderr.")] = None,
) -> None:
    """Run a command with its model calls captured. Its exit code is this command's own."""
    if report not in (None, "-"):
        raise UsageError("--report takes '-' (stderr); the results folder always has report.json")
    if (refusal := _not_a_program(command[0])) is not None:
        screen.err.print(f"polar: {command[0]}: {refusal[1]}")
        raise typer.Exit(refusal[0])
    name = f"capture-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = out or Path("results") / name
    require_writable(folder)
    spec = BuilderSpec(strategy=builder)
    make_builder(spec)
    required = not allow_missing_token_ids
    made = make_engine(
        engine,
        url=engine_url,
        model=model,
        mode=mode,
        tokenizer=tokenizer,
        require_token_ids=required,
        progress=screen.err.print,
    )
    store = open_store(str(folder / DATABASE))
    node = Node(made, store, folder, buffer_replies=buffer_replies, require_token_ids=required)
    code, body = uvloop.run(_capture(node, name, command, spec))
    if report == "-":
        screen.err.print(json.dumps({"folder": str(folder), **body}, indent=2))
    else:
        for warning in body["warnings"]:
            screen.err.print(f"polar: warning: {warning}")
        calls, traces = sum(body["completions"].values()), body["traces"]
        screen.err.print(f"polar: {_many(calls, 'call')}, {_many(traces, 'trace')} in {folder}")
    raise typer.Exit(code)


def _not_a_program(name: str) -> tuple[int, str] | None:
    """Why this can't be started, and a shell's exit code for it; ``None`` where it seems that it can."""
    found = shutil.which(name)
    if found is None:
        if os.path.dirname(name) and os.path.isfile(name):
            return 126, "not executable: chmod +x it, or put its interpreter before it"
        return 127, "command not found"
    try:
        with open(found, "rb") as file:
            begin = file.read(256)
    except OSError:
        return None  # it may be run and not be read
    if begin.startswith(b"#!"):
        line = begin[2:].partition(b"\n")[0].strip(b" \t")
        interpreter = os.fsdecode(line.replace(b"\t", b" ").partition(b" ")[0])
        return None if os.path.exists(interpreter) else (126, f"its interpreter {interpreter!r} is not there")
    return None if b"\0" in begin else (126, "it is a script without a #! line: put its interpreter before it")


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


async def _capture(node: Node, name: str, command: Sequence[str], builder: BuilderSpec) -> tuple[int, dict[str, Any]]:
    await node.start()
    try:
        captures = Captures(node)
        await captures.end_those_cut_off()
        session = await captures.open(session_id=name, metadata={"command": shlex.join(command)})
        endpoint = Endpoint(node.server.url, session.key, node.engine.info.model, node.context_length)
        folder = node.folder.resolve() / "session"
        for part in ("artifacts", "logs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        env = standard_env(endpoint, session_id=name, task_id=name, folder=str(folder))
        code = await _run(command, env)
        error = f"the command ended with exit code {code}" if code else None
        await node.gateway.close(session)
        silent = not await node.store.completions(name)
        if silent and not session.refusals:
            error = node.why_no_call(session, "the command")
        result = await captures.close(name, error=error, builder=builder)
        if silent and result is not None:
            hint = " (it must use the base URL of its environment, such as OPENAI_BASE_URL)"
            screen.err.print(f"polar: {result.error}{'' if session.refusals else hint}")
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
