"""``polar serve``: the rollout service, on one machine or as one of its parts."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from polar.cli import options, screen
from polar.logs import configure
from polar.service import serve_until_told
from polar.settings import ServeConfig, load_settings
from polar.workers import Workers


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Settings: a polar.yaml.")] = None,
    role: Annotated[str | None, typer.Option("--role", help="all, rollout or gateway.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port (8080); 0 takes a free one.")] = None,
    server: Annotated[str | None, typer.Option("--server", help="The rollout server, for --role gateway.")] = None,
    node_id: Annotated[str | None, typer.Option("--node-id", help="This node's name.")] = None,
    public_url: Annotated[str | None, typer.Option("--public-url", help="How others reach this machine.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Gateway nodes behind the port (1).")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="local, vllm, sglang or openai.")] = None,
    engine_url: options.EngineURL = None,
    model: options.Model = None,
    mode: options.Mode = None,
    tokenizer: options.Tokenizer = None,
    store: Annotated[str | None, typer.Option("--store", help="Store URL; by default a file in --out.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder for all files (results/serve).")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS.")] = False,
    no_sandbox: options.NoSandbox = False,
    buffer_replies: options.BufferReplies = False,
) -> None:
    """Serve: post tasks, get results. Ctrl-C or SIGTERM drains, a second one ends at once."""
    said: dict[str, Any] = {
        "role": role,
        "host": host,
        "port": port,
        "server": server,
        "node_id": node_id,
        "public_url": public_url,
        "workers": workers,
        "store": store,
        "out": out,
        "insecure": insecure or None,
        "buffer_replies": buffer_replies or None,
        "runtimes": {"sandbox": "none"} if no_sandbox else None,
    }
    chosen = {"kind": engine, "url": engine_url, "model": model, "mode": mode, "tokenizer": tokenizer}
    if any(chosen.values()):
        said["engines"] = [{name: value for name, value in chosen.items() if value is not None}]
    settings = load_settings(config, {name: value for name, value in said.items() if value is not None})
    configure(os.environ.get("POLAR_LOG", "INFO").upper(), settings.log)
    sys.path.insert(0, str(Path.cwd()))  # where an operator keeps classes of their own; tasks may name those allowed
    work = Workers(settings, screen.err.print).run if settings.workers > 1 else partial(_serve, settings)
    try:
        uvloop.run(work())
    except asyncio.CancelledError:
        raise typer.Exit(1) from None


async def _serve(settings: ServeConfig) -> None:
    await serve_until_told(settings, dict(os.environ), screen.err.print)
