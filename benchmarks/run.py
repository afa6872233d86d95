"""Runs all parts, prints one table, writes the figures as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.calls import measure_chat, measure_tito
from benchmarks.growth import measure_growth

OUT = Path("results") / "benchmarks.json"
PEER_CPU_MS = {"small": 4.7, "8k": 8.5, "40k": 29.0}
"""CPU per call at one in flight that NVIDIA's public Polar took, on a busy machine of the kind that
``docs/benchmarks.md`` names."""


def main() -> None:
    """Measure, print, write ``results/benchmarks.json``."""
    report = uvloop.run(_measure())
    console = Console(width=None if os.isatty(1) else 120)
    console.print(_calls_table(report["chat"], report["tito"]))
    console.print(_growth_table(report["growth"]))
    last, half = report["growth"][-1], report["growth"][-2]
    ratios = ", ".join(
        f"{name} x{last[key] / half[key]:.2f}"
        for name, key in (
            ("build time", "build_ms"),
            ("build peak", "build_peak_mb"),
            ("bytes a call", "stored_bytes_per_call"),
        )
    )
    console.print(
        f"from {half['calls']} to {last['calls']} calls (tokens x{last['tokens'] / half['tokens']:.2f}): {ratios}"
    )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(report, indent=2))
    console.print(f"yardstick {report['yardstick_ms']:.0f} ms, load {report['load_before']:.1f} before")
    console.print(f"{report['seconds']:.0f} s in all; figures in {OUT}")


async def _measure() -> dict[str, Any]:
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        report: dict[str, Any] = {
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "python": platform.python_version(),
            "load_before": os.getloadavg()[0],
            "yardstick_ms": _yardstick_ms(),
            "chat": await measure_chat(Path(folder) / "chat"),
            "tito": await measure_tito(Path(folder) / "tito"),
        }
    report["growth"] = await measure_growth()
    report["seconds"] = time.monotonic() - begin
    return report


def _yardstick_ms() -> float:
    """CPU of a fixed piece of work (two megabytes of JSON out and in): how fast this machine is just now."""
    value = [{"number": number, "text": "x" * 20} for number in range(40_000)]
    times = []
    for _ in range(5):
        begin = time.process_time()
        json.loads(json.dumps(value))
        times.append((time.process_time() - begin) * 1000)
    return statistics.median(times)


def _calls_table(chat: list[dict[str, Any]], tito: list[dict[str, Any]]) -> Table:
    table = Table(title="A call through the gateway, ms", title_justify="left", box=None)
    for column in (
        "mode",
        "call",
        "prompt tokens",
        "in flight",
        "calls",
        "CPU",
        "added p50",
        "engine p50",
        "peer CPU",
    ):
        table.add_column(column, justify="left" if column in ("mode", "call") else "right")
    for mode, rows in (("chat", chat), ("tito", tito)):
        for row in rows:
            peer = PEER_CPU_MS.get(row["call"]) if mode == "chat" and row["in_flight"] == 1 else None
            table.add_row(
                mode,
                row["call"],
                f"{row['prompt_tokens']:,}",
                str(row["in_flight"]),
                str(row["calls"]),
                f"{row['cpu_ms']:.2f}",
                f"{row.get('added_p50_ms', row['p50_ms']):.2f}",
                f"{row['direct_p50_ms']:.2f}" if "direct_p50_ms" in row else "-",
                f"{peer:.1f}" if peer else "",
            )
    return table


def _growth_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="A long session: its trajectory, and its bytes on disk", title_justify="left", box=None)
    columns = (
        "calls",
        "tokens",
        "read ms",
        "build ms",
        "build peak MB",
        "RSS MB",
        "bytes a call",
        "new ids",
        "new text",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["calls"]),
            f"{row['tokens']:,}",
            f"{row['read_ms']:.1f}",
            f"{row['build_ms']:.1f}",
            f"{row['build_peak_mb']:.1f}",
            f"{row['rss_growth_mb']:.1f}",
            f"{row['stored_bytes_per_call']:,.0f}",
            f"{row['new_array_bytes_per_call']:,.0f}",
            f"{row['new_text_bytes_per_call']:,.0f}",
        )
    return table
