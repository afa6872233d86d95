"""What was forgotten is on no disk any more: not in the ledger's file, not in a journal, not beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.config import parse_task
from tests.cli.making import ScriptedProcess, agent, task
from tests.faults.fleet import Fleet, until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("gateways", [0, 1])
async def test_after_retention_nothing_is_left_of_a_session(engine: ScriptedProcess, tmp_path: Path, gateways: int):
    secret = "a-secret-of-old"
    with Fleet(tmp_path, engine, gateways=gateways) as fleet:
        shell = {"harness": "shell", "custom_shell": {"command": agent(1, f"; echo {secret}; exit 3")}}
        async with fleet.client() as client:
            await client.submit(parse_task(task("t", agent=shell, num_samples=2)))
            status = await client.wait("t")
        assert all(secret in str(each.error) for each in status.results)
        fleet.stop()

        def found() -> list[Path]:
            files = [path for part in fleet.parts for path in part.data.rglob("*") if path.is_file()]
            return [path for path in files if secret.encode() in path.read_bytes()]

        assert len(found()) >= 3, "the ledger, and what each agent said"
        for part in fleet.parts:
            part.settings["retention"] = {"days": 1e-6}
            part.start()
        for part in fleet.parts:
            part.wait()
        await until(lambda: not list(tmp_path.glob("*/data/sessions/*")), "the folders are gone")
        await until(lambda: not found(), "it is gone")
        fleet.stop()
