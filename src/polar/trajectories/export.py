"""Trajectories into files that trainers read: Parquet, JSON lines, chat-form SFT data, a dataset folder.

A run has more tokens than memory, so results are taken one at a time and written in row groups. A file is
written under another name and renamed when it is whole: a reader sees all of it or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.result import SessionResult, Trace
from polar.trajectories.chatform import chat_messages, chat_tools
from polar.trajectories.parquet import write_parquet
from polar.trajectories.rows import ARRAY_COLUMNS, nested, rows
from polar.trajectories.where import compile_where

Format = Literal["parquet", "jsonl", "sft", "hf"]
Rows = Iterable[tuple[dict[str, Any], Trace]]


def export(results: Iterable[SessionResult], path: Path, to: Format, where: str | None = None) -> int:
    """Write the traces of these results, one row each.

    Args:
        path: a file; for ``hf`` a folder, which must not be there yet.
        to: ``sft`` takes the ``main`` traces only.
        where: keep the rows for which it holds (see ``polar.trajectories.where``).

    Returns:
        How many rows were written.

    Raises:
        UsageError: a bad ``where``, an unknown format, or a folder that is already there.
    """
    if to not in _WRITERS:
        raise UsageError(f"unknown format {to!r}: use {', '.join(_WRITERS)}")
    keep = compile_where(where) if where else None
    chosen = ((plain, trace) for plain, trace in rows(results) if keep is None or keep(plain))
    path.parent.mkdir(parents=True, exist_ok=True)
    return _WRITERS[to](chosen, path)


def _write_parquet_file(chosen: Rows, path: Path) -> int:
    with _whole_file(path) as file:
        return write_parquet(chosen, file)


def _write_jsonl(chosen: Rows, path: Path) -> int:
    """The same keys as in Parquet; what is a JSON string there is the value itself here."""
    lines = (
        {**plain, **{name: getattr(trace, name) for name in ARRAY_COLUMNS}, **nested(trace)}
        for plain, trace in chosen
    )
    return _write_lines(lines, path)


def _write_sft(chosen: Rows, path: Path) -> int:
    lines = (
        {
            "messages": chat_messages(trace.prompt_messages + trace.response_messages),
            "tools": chat_tools(trace.tools),
        }
        for plain, trace in chosen
        if plain["role"] == "main"
    )
    return _write_lines(lines, path)


def _write_hf(chosen: Rows, path: Path) -> int:
    """A folder for ``datasets.load_dataset(folder)``: the Parquet file and a card that names it."""
    if path.exists():
        raise UsageError(f"{path} is already there: name a new folder")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    (partial / "data").mkdir(parents=True)
    try:
        count = _write_parquet_file(chosen, partial / "data" / "train.parquet")
        (partial / "README.md").write_text(_CARD.format(count=count))
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return count


_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train.parquet
---
# Traces captured with Polar

{count} rows, one per trace: a token sequence whose sampled tokens have `loss_mask` 1, with the logprobs and
weight versions that the engine reported for them (0.0 and -1 elsewhere). `prompt_messages`,
`response_messages`, `tools` and `metadata` are JSON strings.
"""

_WRITERS: dict[str, Callable[[Rows, Path], int]] = {
    "parquet": _write_parquet_file,
    "jsonl": _write_jsonl,
    "sft": _write_sft,
    "hf": _write_hf,
}


def _write_lines(lines: Iterator[dict[str, Any]], path: Path) -> int:
    count = 0
    with _whole_file(path) as file:
        for line in lines:
            file.write(to_json(line) + b"\n")
            count += 1
    return count


@contextmanager
def _whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its name, on disk, when the block is left; on an error nothing remains."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
