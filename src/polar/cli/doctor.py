"""``polar doctor``: what works here, with the fix for what does not."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

import polar
from polar.cli import options, screen
from polar.cli.screen import Table
from polar.contract.errors import PolarError
from polar.engines import DEFAULT_MODEL
from polar.engines.probing import probe, workers_at
from polar.harnesses import by_name, names
from polar.harnesses.install import install
from polar.runtimes import backend


class Check(NamedTuple):
    """One thing that was tried. ``fix`` is what to do where it does not work."""

    what: str
    ok: bool
    detail: str
    fix: str | None = None


def doctor(
    engine_url: options.EngineURL = None,
    model: options.Model = None,
    fix: Annotated[
        list[str] | None, typer.Option("--fix", metavar="HARNESS", help="Install this harness, pinned; repeatable.")
    ] = None,
    as_json: options.JSONOutput = False,
) -> None:
    """Say what works here: engines, runtimes, harnesses, versions, with the fix for what does not."""
    for name in fix or ():
        install(name, screen.err.print)
    checks = [_python(), *_engines(), _runtime(), *_harnesses()]
    servers = [check for url in (engine_url or "").split(",") if url.strip() for check in _server(url.strip(), model)]
    checks.extend(servers)
    if as_json:
        print(json.dumps([check._asdict() for check in checks]))
    else:
        table = Table()
        for check in checks:
            mark = Text("ok", style="green") if check.ok else Text("--", style="yellow")
            table.add_row(mark, Text(check.what), Text(check.detail))
            if check.fix:
                table.add_row("", "", Text(f"fix: {check.fix}", style="dim"))
        screen.out.print(table)
    if not all(check.ok for check in servers if check.fix is None):
        raise typer.Exit(1)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("polar", True, f"{polar.__version__} on Python {version}, {platform.system()} {platform.machine()}")


def _engines() -> Iterator[Check]:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        yield Check(
            "embedded engine",
            False,
            f"{', '.join(missing)} missing",
            "pip install 'polar[engine]' (torch: CPU build)",
        )
    else:
        from polar.engines.models import packaged_folder

        folder = packaged_folder(DEFAULT_MODEL)
        known = f"{DEFAULT_MODEL} is here" if folder.is_dir() else f"{DEFAULT_MODEL} is fetched at first use"
        yield Check("embedded engine", True, known)


def _runtime() -> Check:
    try:
        probe = asyncio.run(backend().probe())
    except PolarError as error:
        return Check("sandbox", False, str(error))
    return Check("sandbox", probe.ok, probe.detail, probe.fix)


def _harnesses() -> Iterator[Check]:
    for name in names():
        harness = by_name(name)
        found = harness.find()
        if found is None:
            yield Check(f"harness {name}", False, f"not installed (pinned: {harness.pinned})", harness.install_hint)
        else:
            other = harness.pinned not in (None, found.version)
            detail = f"{found.version}, tested with {harness.pinned}" if other else found.version
            yield Check(f"harness {name}", True, detail, harness.install_hint if other else None)


def _server(url: str, model: str | None) -> Iterator[Check]:
    """A server, or the servers behind a router."""
    try:
        workers = asyncio.run(workers_at(url, api_key=os.environ.get("POLAR_ENGINE_API_KEY")))
    except PolarError as error:
        yield Check(f"engine {url}", False, str(error))
        return
    if workers:
        yield Check(f"engine {url}", True, f"router with {len(workers)} worker(s), which are called without it")
    for each in workers or [url]:
        yield from _probed(each, model)


def _probed(url: str, model: str | None) -> Iterator[Check]:
    """What the server can't give; last, what it was seen to do, and whether it is of use."""
    try:
        found = asyncio.run(probe(url, model, api_key=os.environ.get("POLAR_ENGINE_API_KEY")))
    except PolarError as error:
        yield Check(f"engine {url}", False, str(error))
        return
    for lack in found.missing:
        yield Check(f"engine {url}", False, f"no {lack.what}", lack.fix)
    yield Check(f"engine {url}", bool(found.token_route or found.chat_ids), found.summary())
