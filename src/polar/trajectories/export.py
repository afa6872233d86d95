"""Trajectories into files that trainers read: Parquet, JSON lines, chat-form SFT data, a dataset folder.

A run has more tokens than memory, so results are taken one at a time and written in row groups. A file is
written under another name and renamed when it is whole: a reader sees all of it or none.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from polar.contract.arrays import to_json
from polar.contract.errors import PolarError, UsageError
from polar.contract.result import SessionResult, Trace
from polar.trajectories.chatform import chat_messages, chat_tools
from polar.trajectories.parquet import write_parquet
from polar.trajectories.rows import ARRAY_COLUMNS, PLAIN_COLUMNS, nested, rows
from polar.trajectories.where import compile_where

Format = Literal["parquet", "jsonl", "sft", "hf"]
Rows = Iterator[tuple[dict[str, Any], Trace]]


class NoRows(PolarError):
    """There is nothing to write, and the message says why. No file was written; one that is there is as it was."""


def export(
    results: Iterable[SessionResult], path: Path, to: Format, where: str | None = None, *, may_be_empty: bool = True
) -> int:
    """Write the traces of these results, one row each.

    Args:
        path: a file; for ``hf`` a folder, which must not be there yet.
        to: ``sft`` takes the ``main`` traces only.
        where: keep the rows for which it holds (see ``polar.trajectories.where``).
        may_be_empty: whether a file without rows is of use.

    Returns:
        How many rows were written.

    Raises:
        UsageError: a bad ``where``, an unknown format, or a folder that is already there.
        NoRows: there is none, and a file without rows is of no use.
    """
    if to not in _WRITERS:
        raise UsageError(f"unknown format {to!r}: use {', '.join(_WRITERS)}")
    keep = compile_where(where) if where else None
    seen = _Seen()
    chosen: Rows = ((plain, trace) for plain, trace in seen.of(rows(results)) if keep is None or keep(plain))
    if to == "sft":
        chosen = ((plain, trace) for plain, trace in chosen if plain["role"] == "main")
    if not may_be_empty:
        first = list(itertools.islice(chosen, 1))
        if not first:
            raise NoRows(f"no row, and nothing was written: {seen.why_none(where)}")
        chosen = itertools.chain(first, chosen)
    path.parent.mkdir(parents=True, exist_ok=True)
    return _WRITERS[to](chosen, path)


class _Seen:
    """What rows there were before any was chosen, to say why none is."""

    def __init__(self) -> None:
        self._count = 0
        self._filled: set[str] = set()

    def of(self, found: Rows) -> Rows:
        for plain, trace in found:
            self._count += 1
            self._filled.update(name for name, value in plain.items() if value is not None)
            yield plain, trace

    def why_none(self, where: str | None) -> str:
        if not self._count:
            return "there is no trace"
        traces = f"all {self._count} traces" if self._count > 1 else "the only trace"
        if where is None:
            return f"{traces} {'are' if self._count > 1 else 'is'} of a side call, and sft takes the main ones"
        asked = [name for name in re.findall(r"\w+", where) if name in PLAIN_COLUMNS]
        empty = [name for name in dict.fromkeys(asked) if name not in self._filled]
        if empty:
            return f"{' and '.join(empty)} is empty in {traces}"
        return f"{where!r} holds for none of {self._count} traces"


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
    """``text_only``: no token ids came with the conversation, so it has not been checked against any."""
    lines = (
        {
            "messages": chat_messages(trace.prompt_messages + trace.response_messages),
            "tools": chat_tools(trace.tools),
            "text_only": bool(trace.metadata.get("text_only")),
        }
        for _, trace in chosen
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
