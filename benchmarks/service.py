"""``python -m benchmarks.service``: what the service itself takes, apart from models and agents. A real ``polar
serve`` (role ``all``) runs sessions whose harness is the shell: some that do nothing, for the rate and for the CPU of
each, and many that sleep at the same time, for the memory of each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import STDOUT
from typing import Any

import psutil
import uvloop
import yaml

from benchmarks.calls import child
from benchmarks.load import free_port
from polar.client import RolloutClient
from polar.config import parse_task
from polar.contract.task import TaskRequest

PEER_RATE = 0.56
"""Sessions per second of NVIDIA's public Polar, as it was told to us: it does not run here."""
TOKEN = "admin-token-of-the-benchmark"
PATIENCE = 300.0
"""Seconds after which a part counts as stuck."""
IDLE_SECONDS = 5.0
_SERVE = [sys.executable, "-c", "from polar.cli import main; main()", "serve", "-c", "polar.yaml"]


def main() -> None:
    """Measure, and print a line for each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__)
    parser.add_argument("--sandboxes", nargs="+", default=["none", "bubblewrap"], choices=["none", "bubblewrap"])
    parser.add_argument("--sessions", type=int, default=200, help="that do nothing")
    parser.add_argument("--sleeping", type=int, default=1000, help="that sleep at the same time; 0: none")
    said = parser.parse_args()
    uvloop.run(_measure(said.sandboxes, said.sessions, said.sleeping))


async def _measure(sandboxes: Sequence[str], sessions: int, sleeping: int) -> None:
    for sandbox in sandboxes:
        async with _service(sandbox, at_once=16) as (server, client):
            await _rate(f"sandbox {sandbox}", server, client, sessions)
        if sleeping:
            async with _service(sandbox, at_once=sleeping) as (server, client):
                await _memory(f"sandbox {sandbox}", server, client, sleeping)
    print(f"the peer: {PEER_RATE} sessions/s, as it was told to us (not run here)")


@asynccontextmanager
async def _service(sandbox: str, *, at_once: int) -> AsyncIterator[tuple[psutil.Process, RolloutClient]]:
    """A service of its own process, which has begun to work."""
    async with child("benchmarks.engine", "small:1:2") as engine:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            port = free_port()
            settings = {
                "engines": [{"kind": "openai", "url": f"http://127.0.0.1:{await engine.line()}"}],
                "pools": {"init": 16, "ready": 16, "run": at_once, "post_run": 16},
                "runtimes": {"sandbox": sandbox},
                "port": port,
                "out": "data",
            }
            Path(folder, "polar.yaml").write_text(yaml.safe_dump(settings))
            with Path(folder, "log.txt").open("w") as log:
                env = {**os.environ, "POLAR_ADMIN_TOKEN": TOKEN, "POLAR_LOG": "WARNING"}
                process = psutil.Popen(_SERVE, cwd=folder, env=env, stdout=log, stderr=STDOUT)
            try:
                url = f"http://127.0.0.1:{port}"
                await _answers(url, process, Path(folder, "log.txt"))
                async with RolloutClient(url, TOKEN) as client:
                    await _run(client, _task("warm", "true", 4))
                    yield process, client
            finally:
                process.terminate()
                await asyncio.to_thread(process.wait, PATIENCE)


async def _answers(url: str, process: psutil.Popen, log: Path) -> None:
    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except OSError:
            return False

    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(ask):
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            await asyncio.sleep(0.1)


def _task(name: str, command: str, samples: int) -> TaskRequest:
    agent = {"harness": "shell", "custom_shell": {"command": command}, "settings": {"allow_no_model_call": True}}
    return parse_task({"task_id": name, "instruction": "-", "num_samples": samples, "agent": agent})


async def _run(client: RolloutClient, task: TaskRequest) -> None:
    async with asyncio.timeout(PATIENCE):
        await client.submit(task)
        ended = await client.wait(task.task_id)
    failed = [result.error for result in ended.results if result.status != "COMPLETED"]
    if failed or ended.completed_sessions != task.num_samples:
        raise RuntimeError(f"{task.task_id}: {len(failed)} failed, the first with: {failed[:1]}")


async def _rate(what: str, server: psutil.Process, client: RolloutClient, sessions: int) -> None:
    before, begin = _spent(server), time.monotonic()
    await _run(client, _task("rate", "true", sessions))
    seconds, after = time.monotonic() - begin, _spent(server)
    spent = [(late - early) * 1000 / sessions for early, late in zip(before, after, strict=True)]
    print(
        f"{what}: {sessions} sessions, {sessions / seconds:.1f}/s; CPU per session: "
        f"server {spent[0]:.1f} + {spent[1]:.1f} ms (user + system), "
        f"its processes {spent[2]:.1f} + {spent[3]:.1f} ms, {sum(spent):.1f} ms in all; {_load()}",
        flush=True,
    )


def _spent(server: psutil.Process) -> tuple[float, float, float, float]:
    """CPU seconds so far: the server's, user and system, and those of all that it started, ended or not."""
    own = server.cpu_times()
    user, system = own.children_user, own.children_system
    for process in server.children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            user += times.user + times.children_user
            system += times.system + times.children_system
    return own.user, own.system, user, system


async def _memory(what: str, server: psutil.Process, client: RolloutClient, sessions: int) -> None:
    before, begin = server.memory_info().rss, time.monotonic()
    await client.submit(_task("sleep", f"sleep {PATIENCE * 2:.0f}", sessions))
    async with asyncio.timeout(PATIENCE):
        while (await client.nodes())[0].metrics.run_inflight < sessions:
            await asyncio.sleep(0.5)
    started = time.monotonic() - begin
    below = server.children(recursive=True)
    grown = server.memory_info().rss - before
    theirs = sum(_own_memory(process) for process in below)
    idle, awake = _cpu([server]), _cpu(below)
    await asyncio.sleep(IDLE_SECONDS)
    idle, awake = _cpu([server]) - idle, _cpu(below) - awake
    print(
        f"{what}: {sessions} asleep after {started:.0f} s: server {(before + grown) / 1e6:.0f} MB, "
        f"{grown / sessions / 1e3:.0f} kB a session; {len(below) / sessions:.0f} processes a session with "
        f"{theirs / sessions / 1e6:.1f} MB of their own; idle CPU: server {idle / IDLE_SECONDS:.2f} cores, "
        f"its processes {awake / IDLE_SECONDS:.2f}; {_load()}",
        flush=True,
    )
    await client.cancel("sleep")
    async with asyncio.timeout(PATIENCE):
        await client.wait("sleep")


def _own_memory(process: psutil.Process) -> int:
    """Resident memory of a process that it shares with no other, in bytes."""
    try:
        own: int = process.memory_full_info().uss
    except psutil.Error:  # it has ended
        return 0
    return own


def _cpu(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds that they have had so far."""
    seconds = 0.0
    for process in processes:
        try:
            times: Any = process.cpu_times()
        except psutil.Error:
            continue
        seconds += times.user + times.system
    return seconds


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


if __name__ == "__main__":
    main()
