"""The table that ``--wait`` and ``--watch`` show at a terminal, made of what a real rollout server answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from polar.cli import screen
from polar.cli.service import _tasks_table
from polar.client import RolloutClient
from polar.contract.task import TaskRequest
from polar.gateway.server import GatewayServer
from polar.rollout.auth import Credentials
from polar.rollout.server import RolloutServer
from polar.store import SQLiteStore
from tests.rollout.making import TOKENS, task


async def test_the_sessions_of_each_task_are_counted_by_stage(tmp_path: Path) -> None:
    ledger = SQLiteStore(tmp_path / "polar.db")
    await ledger.open()
    server = RolloutServer(ledger, Credentials([("admin", "admin", TOKENS["admin"])]), callback_secret="s")
    await server.start()
    http = GatewayServer(server.app)
    await http.start()
    try:
        async with RolloutClient(http.url, token=TOKENS["admin"]) as client:
            for name, samples in (("one", 3), ("two", 1)):
                await client.submit(msgspec.convert(task(name, num_samples=samples), TaskRequest))
            await client.cancel("two")
            console = Console(width=80)
            with console.capture() as shown:
                console.print(await _tasks_table(client, ["one", "two"]))
    finally:
        await http.close()
        await server.close()
        await ledger.close()
    head, *rows = (line.split() for line in shown.get().splitlines())
    told = [{name: cell for name, cell in zip(head, row, strict=True) if cell != "·"} for row in rows]
    assert told == [{"task": "one", screen.STAGES["REGISTERED"]: "3"}, {"task": "two", "error": "1"}]
