"""An error without words still says what it was: a session that ends as ERROR always has its line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar.contract.task import AgentSpec, CustomShell, EvaluatorSpec, TaskRequest
from polar.gateway.lifecycle import Pools
from polar.gateway.session_run import SessionRun
from polar.gateway.tasks import make_parts, run_tasks
from tests.gateway.conftest import MakeWorld
from tests.support.script import Step


class Wordless:
    """An evaluator that raises OSError without a word."""

    name = "wordless"

    def __init__(self, spec: EvaluatorSpec) -> None: ...

    async def evaluate(self, session: object) -> None:
        raise TimeoutError


@pytest.mark.parametrize("stage", ["evaluate", "init"])
async def test_a_session_that_ends_by_it_has_its_name(
    make_world: MakeWorld, tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await make_world([Step(text="hi")])  # type: ignore[misc]
    task = TaskRequest(
        task_id="w",
        instruction="i",
        agent=AgentSpec(
            harness="shell", custom_shell=CustomShell(command="true"), settings={"allow_no_model_call": True}
        ),
        evaluator=EvaluatorSpec(strategy=f"{__name__}:Wordless"),
    )
    if stage == "init":

        async def prepare(self: SessionRun) -> None:
            raise OSError

        monkeypatch.setattr(SessionRun, "_prepare", prepare)
    parts = await make_parts(task, sandbox="none", allow_import=True)
    async with asyncio.timeout(30):
        await run_tasks(world.node, [(task, parts)], pools=Pools())
    (result,) = await world.node.store.results("w")
    assert (result.status, result.error) == ("ERROR", "TimeoutError" if stage == "evaluate" else "OSError")
