"""``polar demo``: the main job on the embedded engine: a real model, a real harness, one screen of result."""

from __future__ import annotations

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from polar.cli import options, screen
from polar.cli.run import Settings, run_to_end
from polar.config import load_task
from polar.engines import DEFAULT_MODEL, make_engine
from polar.gateway.lifecycle import Pools
from polar.harnesses.install import install


def demo(
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples of each task.")] = 2,
    out: options.Out = None,
    no_sandbox: options.NoSandbox = False,
    as_json: options.JSONOutput = False,
) -> None:
    """Run a few small tasks with the pi harness on SmolLM2-135M, from nothing to traces."""
    begin = time.monotonic()
    folder = out or Path("results") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    requests = []
    for entry in sorted(files("polar").joinpath("demo").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            with as_file(entry) as path:
                requests.append(load_task(path))
    requests = [msgspec.structs.replace(task, num_samples=samples) for task in requests]
    with ThreadPoolExecutor() as pool:
        for ready in (pool.submit(install, "pi", screen.err.print), pool.submit(_fetch_model)):
            ready.result()
    settings = Settings(
        engine=lambda: make_engine("local", model=DEFAULT_MODEL, progress=screen.err.print),
        folder=folder,
        sandbox="none" if no_sandbox else "bubblewrap",
        pools=Pools(init=2, ready=4, run=4),
        quiet=as_json,
    )
    screen.err.print(f"{DEFAULT_MODEL} in the embedded engine, pi in a sandbox, {samples} samples of each task:")
    report = run_to_end(requests, settings)
    if as_json:
        print(json.dumps({"folder": str(folder), **report}))
        return
    screen.print_report(report, folder)
    screen.out.print(f"\n{time.monotonic() - begin:.0f} s. A model this small mostly fails, as the rewards say.")
    polar = "polar" if shutil.which("polar") else sys.argv[0]
    screen.out.print(f"Look at a trajectory: {polar} show {folder} {requests[0].task_id}-0", soft_wrap=True)


def _fetch_model() -> None:
    from polar.engines.models import ensure_model

    ensure_model(DEFAULT_MODEL, progress=screen.err.print)
