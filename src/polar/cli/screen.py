"""What a person sees while sessions run and when they are done. All of it goes to stderr, but for results."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Column
from rich.table import Table as _Filled
from rich.text import Text

from polar.contract.task import TaskRequest
from polar.store.base import SessionRecord

STAGES = {
    "REGISTERED": "new",
    "INITIALIZING": "init",
    "READY": "ready",
    "RUNNING": "running",
    "POST_RUN": "post",
    "COMPLETED": "done",
    "ERROR": "error",
    "TIMEOUT": "timeout",
}
"""The states, and their heads in the live table, which fits into 80 columns."""
FOLDED = {"BUILDING": "POST_RUN", "EVALUATING": "POST_RUN"}
_COLOURS = {"COMPLETED": "green", "ERROR": "red", "TIMEOUT": "yellow", "RUNNING": "cyan"}

_WHOLE = 1_000_000


class _Console(Console):
    """Cuts and wraps nothing where no terminal is and ``COLUMNS`` names no width: programs read it there."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        whole = not self.is_terminal and "COLUMNS" not in os.environ
        return ConsoleDimensions(_WHOLE, found.height) if whole else found

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


# What is printed may hold anything: brackets are not markup, and a line stays one line.
err = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
out = _Console(highlight=False, markup=False)


class Table(_Filled):
    """Columns without lines between them, as wide as the terminal at most; no line ends in blanks.

    Args:
        heads: of the columns that are there from the start; without any there is no line of heads.
    """

    def __init__(self, *heads: Column | str) -> None:
        super().__init__(*heads, box=None, pad_edge=False, show_header=bool(heads))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        filled = (each for each in super().__rich_console__(console, options) if isinstance(each, Segment))
        for line in Segment.split_lines(filled):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from line
            yield Segment.line()


class Progress:
    """Sessions by stage, live on a terminal; a line for each session that ends elsewhere.

    Args:
        quiet: show nothing (``--json`` with nobody watching).
    """

    def __init__(self, tasks: list[TaskRequest], *, quiet: bool = False) -> None:
        self._tasks = tasks
        self._records: dict[str, SessionRecord] = {}
        self._quiet = quiet
        self._live = Live(console=err, refresh_per_second=8, transient=True, get_renderable=self._table)

    def __enter__(self) -> Progress:
        if err.is_terminal and not self._quiet:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def update(self, record: SessionRecord) -> None:
        """A session has moved on."""
        before = self._records.get(record.session_id)
        self._records[record.session_id] = record
        ended = record.state in ("COMPLETED", "ERROR", "TIMEOUT") and (
            before is not None and before.state != record.state
        )
        if ended and not err.is_terminal and not self._quiet:
            err.print(f"{record.session_id}: {record.state}{f' ({record.error})' if record.error else ''}")

    def _table(self) -> Table:
        table = Table("task")
        for stage, head in STAGES.items():
            table.add_column(head, justify="right", style=_COLOURS.get(stage, ""))
        for task in self._tasks:
            records = [r for r in list(self._records.values()) if r.task_id == task.task_id]
            counts = Counter(FOLDED.get(record.state, record.state) for record in records)
            counts["REGISTERED"] += task.num_samples - len(records)
            table.add_row(task.task_id, *(str(counts[stage] or "·") for stage in STAGES))
        return table


def print_report(report: dict[str, Any], folder: Path) -> None:
    """The end of a run on one screen."""
    table = Table("task", "samples", "rewards")
    for name, task in report["tasks"].items():
        rewards = " ".join("-" if reward is None else f"{reward:g}" for reward in task["rewards"])
        table.add_row(name, str(task["requested"]), rewards or "-")
    out.print(table)
    sessions = {name.lower(): count for name, count in report["sessions"].items() if count}
    mean = report["mean_reward"]
    rows = (
        ("sessions", _counts(sessions)),
        ("mean reward", "-" if mean is None else f"{mean:.3g}"),
        ("model calls", _counts(report["completions"])),
        ("traces", f"{report['traces']}, {report['merge_factor']:.2f} calls merged into each on average"),
        ("trained", f"{report['tokens_trained']} tokens"),
        ("splits", _counts(report["splits"]) or "none"),
        ("seconds", ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in report["seconds"].items())),
    )
    for name, value in rows:
        out.print(Text.assemble((f"{name:<12}", "bold"), value or "-"))
    for error, count in report["errors"].items():
        out.print(Text(f"{'error':<12}{f'{count} x ' if count > 1 else ''}{error}", style="red"))
    for warning, count in report["warnings"].items():
        out.print(Text(f"{'warning':<12}{f'{count} x ' if count > 1 else ''}{warning}", style="yellow"))
    out.print(Text.assemble((f"{'files':<12}", "bold"), str(folder)))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
