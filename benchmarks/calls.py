"""What a model call costs: CPU of the gateway process, and the latency that it adds to the engine's own.

A *cell* is one kind of call at one number in flight. Its sessions have their history captured before, each
makes one call that does not count, and then those that do; in the cells of first calls there is no history,
and only the first call counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conversation import AGENT, SMALL, Conversation
from benchmarks.load import Client, drive, p50_ms


@dataclass(frozen=True)
class Cell:
    """``history`` calls are captured before; ``sessions`` then make ``calls`` calls each (one of them first)."""

    what: str
    conversation: Conversation
    call: int
    in_flight: int
    sessions: int
    calls: int
    first: bool = False


def chat_cells() -> list[Cell]:
    """Calls through an engine that renders by itself."""
    cells = []
    for what, conversation, call in (("small", SMALL, 1), ("8k", AGENT, 8), ("40k", AGENT, 48)):
        cells += [
            Cell(what, conversation, call, 1, 64, 3),
            Cell(what, conversation, call, 32, 128, 3),
            Cell(what, conversation, call, 256, 256, 3),
        ]
    for what, conversation, call in (("small, first", SMALL, 1), ("8k, first", AGENT, 8), ("40k, first", AGENT, 48)):
        cells += [Cell(what, conversation, call, 1, 96, 1, True), Cell(what, conversation, call, 32, 160, 1, True)]
    return cells


def tito_cells() -> list[Cell]:
    """Calls that Polar renders, token in and token out. Their history is made of real calls, one by one."""
    return [
        Cell("small", SMALL, 1, 1, 64, 3),
        Cell("small", SMALL, 1, 32, 64, 3),
        Cell("20 messages", AGENT, 8, 1, 24, 3),
        Cell("20 messages", AGENT, 8, 32, 32, 3),
    ]


class Child:
    """A process that answers a JSON line with a JSON line."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def line(self) -> Any:
        """Its next line.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark ended early")
        return json.loads(line)

    async def ask(self, **command: Any) -> Any:
        """Its answer to a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.line()


@asynccontextmanager
async def child(module: str, *arguments: str) -> AsyncIterator[Child]:
    """A module run in a process of its own, ended with this context."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, limit=1 << 20
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure_chat(folder: Path) -> list[dict[str, Any]]:
    """Every chat cell: a row each."""
    async with child("benchmarks.engine", "small:1:6", "agent:8:13", "agent:48:53") as engine:
        engine_port = int(await engine.line())
        async with child("benchmarks.gateway", str(folder), f"http://127.0.0.1:{engine_port}") as gateway:
            port = int((await gateway.line())["url"].rpartition(":")[2])
            return [await _chat_cell(cell, gateway, port, engine_port) for cell in chat_cells()]


async def measure_tito(folder: Path) -> list[dict[str, Any]]:
    """Every token-in-token-out cell: a row each."""
    async with child("benchmarks.gateway", str(folder)) as gateway:
        port = int((await gateway.line())["url"].rpartition(":")[2])
        return [await _tito_cell(cell, gateway, port) for cell in tito_cells()]


async def _chat_cell(cell: Cell, gateway: Child, port: int, engine_port: int) -> dict[str, Any]:
    clients = await _open(cell, gateway, history=0 if cell.first else cell.call)
    skip = 0 if cell.first else 1
    if skip:
        await drive(port, clients, in_flight=cell.in_flight, calls=skip)
    row = await _measure(cell, gateway, port, clients, skip)
    direct = [
        Client("none", f"{client.name}.direct", client.place, cell.conversation, cell.call) for client in clients
    ]
    straight = await drive(engine_port, direct, in_flight=cell.in_flight, calls=cell.calls)
    row["direct_p50_ms"] = p50_ms(straight)
    row["added_p50_ms"] = row["p50_ms"] - row["direct_p50_ms"]
    await _check(gateway, clients, (0 if cell.first else cell.call) + skip + cell.calls, row)
    return row


async def _tito_cell(cell: Cell, gateway: Child, port: int) -> dict[str, Any]:
    clients = await _open(cell, gateway, history=0)
    clients = [Client(c.key, c.name, c.place, c.conversation, 0) for c in clients]
    await drive(port, clients, in_flight=cell.in_flight, calls=cell.call + 1)
    row = await _measure(cell, gateway, port, clients, cell.call + 1)
    await _check(gateway, clients, cell.call + 1 + cell.calls, row)
    return row


async def _open(cell: Cell, gateway: Child, *, history: int) -> list[Client]:
    clients = []
    for number in range(cell.sessions):
        kind = "first" if cell.first else "grown"
        name = f"{cell.conversation.name}.{cell.call}.{kind}.{cell.in_flight}.{number}"
        place = f"@{cell.in_flight % 1000:03d}{number:03d}"
        opened = await gateway.ask(open=name, conversation=cell.conversation.name, call=history, place=place)
        clients.append(Client(opened["key"], name, place, cell.conversation, cell.call))
    return clients


async def _measure(cell: Cell, gateway: Child, port: int, clients: list[Client], skip: int) -> dict[str, Any]:
    """Three rounds, of which the cheapest counts: other load on the machine only ever adds."""
    if cell.first:
        rounds = [(clients[number::3], 0) for number in range(3)]
    else:
        rounds = [(clients, skip + turn) for turn in range(cell.calls)]
    cpu: list[float] = []
    p50: list[float] = []
    for chosen, turn in rounds:
        before = (await gateway.ask(cpu=1))["cpu"]
        seconds = await drive(port, chosen, in_flight=cell.in_flight, calls=1, skip=turn)
        cpu.append(((await gateway.ask(cpu=1))["cpu"] - before) * 1000 / len(seconds))
        p50.append(p50_ms(seconds))
    return {
        "call": cell.what,
        "in_flight": cell.in_flight,
        "calls": len(clients) * cell.calls,
        "cpu_ms": min(cpu),
        "cpu_ms_rounds": cpu,
        "p50_ms": min(p50),
    }


async def _check(gateway: Child, clients: list[Client], expected: int, row: dict[str, Any]) -> None:
    """Figures of calls that were not captured, or not exactly, would mean nothing."""
    for client in clients:
        found = await gateway.ask(check=client.name)
        row["prompt_tokens"] = found["prompt_tokens"]
        if found["completions"] != expected or found["inexact"]:
            raise RuntimeError(f"{client.name}: {found} instead of {expected} exact completions")
