"""What a long session costs: time and memory to build its trajectory, and its bytes on disk, by its length.

A session of 100 calls grows by 1,000 tokens a call to 100,000. Each length runs in a process of its own, so
that its peak memory is its own.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.conversation import Conversation
from polar.contract.completion import Completion
from polar.contract.result import Trajectory
from polar.contract.task import BuilderSpec
from polar.store import open_store
from polar.store.base import SessionRecord
from polar.trajectories.assemble import assemble

LONG = Conversation("long", opening=1500, output=4270, tools=1)
LENGTHS = (25, 50, 100)
_MB = 1 << 20


async def measure_growth() -> list[dict[str, Any]]:
    """A row for each length, in calls."""
    rows = []
    for calls in LENGTHS:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.growth", str(calls), stdout=asyncio.subprocess.PIPE
        )
        answer, _ = await process.communicate()
        if process.returncode:
            raise RuntimeError("a process of the benchmark failed")
        rows.append(json.loads(answer))
    return rows


async def _measure(calls: int, folder: Path) -> dict[str, Any]:
    path = folder / "polar.db"
    row = await _write(calls, path)
    store = open_store(str(path), read_only=True)
    await store.open()
    assemble(await store.completions("s"), BuilderSpec())  # imports and caches are not the session's
    before = _peak_rss()
    begin = time.perf_counter()
    completions = await store.completions("s")
    row["read_ms"] = (time.perf_counter() - begin) * 1000
    row["build_ms"] = min(_build_ms(completions) for _ in range(5))
    row["rss_growth_mb"] = (_peak_rss() - before) / _MB
    del completions
    tracemalloc.start()
    completions = await store.completions("s")
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    trajectory = assemble(completions, BuilderSpec())
    row["completions_mb"] = held / _MB
    row["build_peak_mb"] = (tracemalloc.get_traced_memory()[1] - held) / _MB
    tracemalloc.stop()
    _check(trajectory, calls)
    await store.close()
    return row


async def _write(calls: int, path: Path) -> dict[str, Any]:
    """Keep the session; what is new in it, and what it takes."""
    store = open_store(str(path))
    await store.open()
    await store.put_session(
        SessionRecord(session_id="s", task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0)
    )
    last: Completion | None = None
    arrays = text = 0
    for call in range(calls):
        last = LONG.completion(call, f"@{call:06d}", "s", last)
        arrays += last.prompt_delta.nbytes + last.response_ids.nbytes + last.logprobs.nbytes
        text += len(msgspec.json.encode(last.messages)) + len(msgspec.json.encode(last.reply))
        await store.put_completion(last)
    await store.close()
    assert last is not None
    return {
        "calls": calls,
        "tokens": last.total_len,
        "stored_bytes_per_call": path.stat().st_size / calls,
        "new_array_bytes_per_call": arrays / calls,
        "new_text_bytes_per_call": text / calls,
    }


def _build_ms(completions: list[Completion]) -> float:
    begin = time.perf_counter()
    assemble(completions, BuilderSpec())
    return (time.perf_counter() - begin) * 1000


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check(trajectory: Trajectory, calls: int) -> None:
    if len(trajectory.traces) != 1 or len(trajectory.traces[0].completion_ids) != calls:
        raise RuntimeError(f"{calls} calls did not become one trace")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(asyncio.run(_measure(int(sys.argv[1]), Path(name)))))
