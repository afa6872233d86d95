"""Sandboxes for tests, and a short way to run a line in one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from polar.contract.runtime import Command, Runtime


@dataclass
class Ran:
    exit_code: int
    timed_out: bool
    out: str
    err: str


@dataclass
class Box:
    """A sandbox with a place for its logs."""

    runtime: Runtime
    logs: Path

    async def sh(self, line: str, *, timeout: float = 30, **env: str) -> Ran:
        result = await self.runtime.exec(Command(line, env=env), timeout=timeout, logs=self.logs, name="line")
        return Ran(
            result.exit_code,
            result.timed_out,
            result.stdout.read_text(errors="replace"),
            result.stderr.read_text(errors="replace"),
        )


def processes_with(mark: str) -> list[int]:
    """Living processes of this machine with ``mark`` in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if any(mark in part for part in line) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # what is waited for is outside of this process
            await asyncio.sleep(0.02)
