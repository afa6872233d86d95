"""What comes after the agent: traces and reward, in a time of their own, which is never mistaken for the tests'."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from polar.contract.result import SessionResult
from polar.contract.task import AgentSpec, CustomShell, EvaluatorSpec, TaskRequest
from polar.evaluators import Evaluation
from polar.gateway import evaluation
from polar.gateway.lifecycle import Pools
from polar.gateway.session_run import SessionRun
from polar.gateway.tasks import make_parts, run_tasks
from polar.redaction import Redaction
from polar.results import rebuild
from polar.runtimes.sandbox import LocalRuntime
from polar.store.base import SessionRecord
from tests.gateway.conftest import MakeWorld, World
from tests.support.script import Step


def a_task(evaluator: dict[str, Any], command: str = "true", samples: int = 1) -> TaskRequest:
    return TaskRequest(
        task_id="t",
        instruction="i",
        num_samples=samples,
        agent=AgentSpec(
            harness="shell", custom_shell=CustomShell(command=command), settings={"allow_no_model_call": True}
        ),
        evaluator=EvaluatorSpec(strategy="test_on_output", config=evaluator),
    )


async def run(world: World, task: TaskRequest, pools: Pools | None = None) -> list[SessionResult]:
    async with asyncio.timeout(60):
        await run_tasks(world.node, [(task, await make_parts(task, sandbox="none"))], pools=pools or Pools())
    return await world.node.store.results("t")


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world([Step(text="hi")])  # type: ignore[misc]
    return made


async def test_tests_have_the_time_that_the_task_gives_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "POST_RUN_SECONDS", 31.0)
    (result,) = await run(world, a_task({"test_command": "sleep 2", "timeout_seconds": 20}))
    assert (result.status, result.error) == ("COMPLETED", None)
    assert result.trajectory.metadata["evaluation"]["outcome_reward"] == 1.0


async def test_tests_that_did_not_fit_into_post_run_have_no_reward(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "POST_RUN_SECONDS", 31.0)
    (result,) = await run(world, a_task({"test_command": "sleep 300"}))
    assert result.status == "ERROR"
    assert "timeout_seconds" in str(result.error)
    assert result.trajectory.metadata["evaluation"]["outcome_reward"] is None


def hide(text: str) -> str:
    return text.replace("secret", "[gone]")


@pytest.mark.parametrize("fails", [False, True])
async def test_what_is_taken_out_is_not_kept_of_tests_errors_and_output(world: World, fails: bool) -> None:
    world.node.redaction = Redaction([("hide", hide)])
    command = f"echo 'an open secret' | tee /dev/stderr; exit {int(fails)}"
    (result,) = await run(world, a_task({"test_command": "grep -q nothing x || echo the secret test"}, command))
    kept = msgspec.json.encode(await world.node.store.sessions("t")).decode() + repr(result)
    assert "secret" not in kept
    assert "[gone]" in kept
    assert result.status == ("ERROR" if fails else "COMPLETED")
    said = [path.read_text() for path in (world.folder / "sessions").rglob("*.std*")]
    assert "an open [gone]\n" in said
    assert not any("secret" in text for text in said)


async def test_tests_whose_words_can_not_be_redacted_have_no_reward(world: World) -> None:
    def fails(text: str) -> str:
        raise RuntimeError("no idea")

    world.node.redaction = Redaction([("fails", fails)])
    (result,) = await run(world, a_task({"test_command": "echo secret"}))
    assert (result.status, result.error) == ("ERROR", "redaction: fails failed: RuntimeError: no idea")
    assert result.trajectory.metadata["evaluation"]["outcome_reward"] is None
    assert "secret" not in repr(result)
    assert not [path for path in (world.folder / "sessions").rglob("*.std*") if path.stat().st_size]


class NoRoom(Redaction):
    """One for which there is no room, where it comes to this file."""

    def __init__(self, name: str) -> None:
        super().__init__([("hide", hide)])
        self._name = name

    def file(self, path: Path) -> None:
        if path.name == self._name:
            raise OSError(errno.ENOSPC, "no space left on device")
        super().file(path)


async def test_output_that_can_not_be_redacted_goes_and_keeps_no_other_as_it_is(world: World) -> None:
    world.node.redaction = NoRoom("agent.stdout")
    command = "echo 'an open secret' | tee /dev/stderr"
    (result,) = await run(world, a_task({"test_command": "echo another secret"}, command))
    assert result.status == "COMPLETED"
    said = {path.name: path.read_text() for path in (world.folder / "sessions").rglob("*.std*")}
    assert "agent.stdout" not in said
    assert said["agent.stderr"] == "an open [gone]\n"
    assert "another [gone]\n" in said.values()
    assert not any("secret" in text for text in said.values())


async def test_output_is_redacted_though_the_sandbox_can_not_be_closed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a session that is handed back, whose end nobody has asked for."""

    close = LocalRuntime.close

    async def fails(self: LocalRuntime) -> None:
        await close(self)
        raise OSError(errno.EBUSY, "device or resource busy")

    task = a_task({"test_command": "true"}, "echo 'an open secret'")
    world.node.redaction = Redaction([("hide", hide)])
    record = SessionRecord(session_id="t-0", task_id="t", sample_index=0, created_at=1.0, updated_at=1.0)
    run = SessionRun(world.node, task, record, await make_parts(task, sandbox="none"), lambda _: None)
    await run.initialize()
    await run.run()
    assert "secret" in (run.folder / "agent.stdout").read_text()
    monkeypatch.setattr(LocalRuntime, "close", fails)
    await run.release()
    assert (run.folder / "agent.stdout").read_text() == "an open [gone]\n"


class Patient:
    """An evaluator that waits until all of three sessions are past their agents."""

    name = "patient"
    seen: ClassVar[set[str]] = set()
    all_ran = asyncio.Event()

    def __init__(self, spec: EvaluatorSpec) -> None: ...

    async def evaluate(self, session: object) -> Evaluation:
        async with asyncio.timeout(20):
            await self.all_ran.wait()
        return Evaluation(1.0)

    @classmethod
    def changed(cls, record: SessionRecord) -> None:
        if record.state == "POST_RUN":
            cls.seen.add(record.session_id)
        if len(cls.seen) == 3:
            cls.all_ran.set()


async def test_a_session_that_waits_to_be_evaluated_does_not_say_that_it_runs(world: World) -> None:
    task = msgspec.structs.replace(a_task({}, samples=3), evaluator=EvaluatorSpec(strategy=f"{__name__}:Patient"))
    parts = await make_parts(task, sandbox="none", allow_import=True)
    async with asyncio.timeout(60):
        await run_tasks(world.node, [(task, parts)], pools=Pools(post_run=1), on_change=Patient.changed)
    assert [result.error for result in await world.node.store.results("t")] == [None] * 3


@pytest.mark.parametrize(
    ("limits", "source"),
    [
        ({"agent_timeout_seconds": 0.5}, "agent"),
        ({"metadata": {"agent_timeout": 0.5}}, "agent"),
        ({"timeout_seconds": 4.0, "agent_timeout_seconds": 500.0}, "session"),
    ],
)
async def test_a_result_says_whose_time_was_over(world: World, limits: dict[str, Any], source: str) -> None:
    task = msgspec.structs.replace(a_task({"test_command": "true"}, "sleep 300"), **limits)
    (result,) = await run(world, task)
    assert result.status == "TIMEOUT", result.error
    says = {"status": "timeout", "timeout_source": source, "timeout_stage": "exec"}
    assert result.trajectory.metadata["agent_result"] == says
    built = await rebuild(world.node.store, result)
    assert built.trajectory.metadata["agent_result"] == says


async def test_a_session_in_time_has_nothing_to_say_of_it(world: World) -> None:
    (result,) = await run(world, a_task({"test_command": "true"}))
    assert "agent_result" not in (await rebuild(world.node.store, result)).trajectory.metadata
