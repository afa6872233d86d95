"""The real harnesses in a real sandbox, at a real gateway, with a scripted model behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.contract.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest
from polar.gateway.lifecycle import Pools
from polar.gateway.node import Node
from polar.gateway.tasks import make_parts, run_tasks
from polar.harnesses.install import install
from polar.results import rebuild
from polar.runtimes.bubblewrap import find_bwrap
from polar.store import open_store
from tests.support.model import ScriptedModel
from tests.support.script import Script, Step
from tests.support.tinymodel import make_tiny_model
from tests.support.tokens import ScriptedTokenEngine


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Ran:
    """A session that is over: its result, its calls, and what the harness said."""

    result: SessionResult
    completions: list[Completion]
    model: ScriptedModel
    stdout: str
    stderr: str


Run = Callable[..., Awaitable[Ran]]


@pytest.fixture
def session(tiny_model: Path, tmp_path: Path) -> Run:
    """Run one session of a harness, installed where it is missing, in ids-in, ids-out mode."""
    if find_bwrap() is None:
        pytest.skip("no bubblewrap here")

    async def go(
        name: str,
        steps: Sequence[Step],
        *,
        instruction: str = "Make greeting.txt with the word hello in it.",
        test: str = "true",
        prepare: Sequence[str] = (),
        context_length: int = 131072,
        timeout: float = 240.0,
        **agent: Any,
    ) -> Ran:
        install(name)
        model = ScriptedModel(tiny_model, Script(list(steps)), max_model_len=context_length)
        node = Node(ScriptedTokenEngine(model), open_store(str(tmp_path / "polar.db")), tmp_path)  # type: ignore[arg-type]
        task = TaskRequest(
            task_id="t",
            instruction=instruction,
            agent=AgentSpec(harness=name, model_name="some/model", **agent),
            evaluator=EvaluatorSpec(strategy="test_on_output", config={"test_command": test}),
            runtime=RuntimeSpec(prepare=tuple(prepare)),
            timeout_seconds=timeout,
        )
        await node.start()
        try:
            await run_tasks(node, [(task, await make_parts(task))], pools=Pools())
            result = await rebuild(node.store, (await node.store.results())[0])
            logs = tmp_path / "sessions" / result.session_id / "attempt-1"
            said = [(logs / f"agent.{stream}").read_text(errors="replace") for stream in ("stdout", "stderr")]
            return Ran(result, await node.store.completions(result.session_id), model, said[0], said[1])
        finally:
            await node.close()

    return go
