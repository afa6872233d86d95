"""``polar export``: traces of a results folder in another form."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polar.cli import options, screen
from polar.contract.errors import UsageError
from polar.contract.task import BuilderSpec
from polar.results import open_folder, results_so_far, stream_results
from polar.trajectories import make_builder
from polar.trajectories.export import export

_NAMES = {"parquet": "export.parquet", "jsonl": "export.jsonl", "sft": "sft.jsonl", "hf": "dataset"}
"""``traces.parquet`` is the run's own view: it is not overwritten by another selection."""


def export_command(
    path: Annotated[Path, typer.Argument(help="A results folder.")],
    to: Annotated[str, typer.Option("--to", help="parquet, jsonl, sft or hf.")] = "parquet",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File (hf: folder) to write.")] = None,
    builder: Annotated[
        str | None, typer.Option("--builder", help="Build traces anew: prefix_merging or per_request.")
    ] = None,
    builder_config: Annotated[str, typer.Option("--builder-config", help="Its config, as JSON.")] = "{}",
    where: Annotated[str | None, typer.Option("--where", help="Keep rows, e.g. 'reward >= 1'.")] = None,
    allow_import: options.AllowImport = False,
    as_json: options.JSONOutput = False,
) -> None:
    """Export the traces of a results folder."""
    if allow_import:
        sys.path.insert(0, str(Path.cwd()))
    if to not in _NAMES:
        raise UsageError(f"unknown format {to!r}: use {', '.join(_NAMES)}")
    spec = None
    if builder is not None:
        spec = BuilderSpec(strategy=builder, config=_config(builder_config))
        make_builder(spec, allow_import)
    target = out or path / _NAMES[to]
    rows = asyncio.run(_export(path, target, to, spec, where, allow_import))
    if as_json:
        print(json.dumps({"path": str(target), "rows": rows}))
    else:
        screen.out.print(f"{rows} rows in {target}")


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--builder-config is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UsageError("--builder-config must be a JSON object")
    return config


async def _export(
    path: Path, target: Path, to: Any, builder: BuilderSpec | None, where: str | None, allow_import: bool
) -> int:
    store = await open_folder(path)
    try:
        return await stream_results(
            store,
            await results_so_far(store),
            lambda results: export(results, target, to, where, may_be_empty=False),
            builder,
            allow_import=allow_import,
            with_text=to == "sft",
        )
    except OSError as error:
        raise UsageError(f"{target} can't be written ({error.strerror or error}): name another with --out") from None
    finally:
        await store.close()
