"""The places of the stages: how many sessions are where, and what an operator sees of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from polar.contract.task import AgentSpec, CustomShell, EvaluatorSpec, TaskRequest
from polar.gateway.lifecycle import Pools, Stages
from polar.gateway.metrics import NodeCollector, StagesCollector
from polar.gateway.session_run import SessionRun
from polar.gateway.tasks import make_parts
from polar.store.base import SessionRecord
from tests.gateway.conftest import MakeWorld, World
from tests.support.script import Step

SESSIONS = 8


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world([Step(text="hi")])  # type: ignore[misc]
    return made


def a_task(gate: Path) -> TaskRequest:
    """Its agents wait until the gate is there."""
    return TaskRequest(
        task_id="t",
        instruction="i",
        num_samples=SESSIONS,
        agent=AgentSpec(
            harness="shell",
            custom_shell=CustomShell(command=f"until [ -e {gate} ]; do sleep 0.05; done"),
            settings={"allow_no_model_call": True},
        ),
        evaluator=EvaluatorSpec(strategy="test_on_output", config={"test_command": "true"}),
    )


async def test_prepared_sessions_wait_in_a_bounded_buffer_and_those_behind_them_where_they_are(
    world: World, tmp_path: Path
) -> None:
    task = a_task(tmp_path / "gate")
    parts = await make_parts(task, sandbox="none")
    stages = Stages(Pools(init=2, ready=1, run=2, post_run=1))
    registry = CollectorRegistry()
    registry.register(StagesCollector(stages))
    states: dict[str, str] = {}
    settled = asyncio.Event()

    def changed(record: SessionRecord) -> None:
        states[record.session_id] = record.state
        if Counter(states.values()) == {"RUNNING": 2, "READY": 1, "INITIALIZING": 2, "REGISTERED": 3}:
            settled.set()

    def number(name: str, stage: str) -> float | None:
        return registry.get_sample_value(f"polar_stage_{name}", {"stage": stage})

    await world.node.store.put_task(task)
    runs = []
    for index in range(SESSIONS):
        record = SessionRecord(
            session_id=f"t-{index}", task_id="t", sample_index=index, created_at=0.0, updated_at=0.0
        )
        await world.node.store.put_session(record)
        changed(record)
        runs.append(SessionRun(world.node, task, record, parts, changed))
    async with asyncio.timeout(60):
        living = asyncio.gather(*(stages.live(run) for run in runs))
        await settled.wait()
        while stages.places["ready"].waiting < 2:  # both are prepared, and go no further
            await asyncio.sleep(0.01)
        assert Counter(states.values()) == {"RUNNING": 2, "READY": 1, "INITIALIZING": 2, "REGISTERED": 3}
        assert [number("sessions", stage) for stage in ("init", "ready", "run", "post_run")] == [2, 1, 2, 0]
        assert [number("queue", stage) for stage in ("init", "ready", "run", "post_run")] == [3, 2, 1, 0]
        assert msgspec.structs.asdict(stages.load()) == {
            "init_queue_depth": 3,
            "init_inflight": 2,
            "ready_depth": 1,
            "run_inflight": 2,
            "postrun_queue_depth": 0,
            "postrun_inflight": 0,
        }
        (tmp_path / "gate").touch()
        await living
    assert set(states.values()) == {"COMPLETED"}
    for stage in ("init", "ready", "run", "post_run"):
        assert number("wait_seconds_count", stage) == SESSIONS
        assert (number("sessions", stage), number("queue", stage)) == (0, 0)
    assert (number("wait_seconds_sum", "run") or 0.0) > 0.0


async def test_how_long_calls_waited_for_a_pause_to_end_is_counted(world: World) -> None:
    registry = CollectorRegistry()
    registry.register(NodeCollector(world.node))
    gate = world.node.gateway.inference
    assert (await gate.pause(5)).paused
    chat = world.client().chat.completions
    call = asyncio.create_task(chat.create(model="m", messages=[{"role": "user", "content": "hello"}]))
    async with asyncio.timeout(20):
        while not gate.status().waiting:
            await asyncio.sleep(0.01)
        gate.resume()
        await call
    labels = {"reason": "pause", "url": ""}
    assert registry.get_sample_value("polar_engine_wait_seconds_count", labels) == 1
    assert (registry.get_sample_value("polar_engine_wait_seconds_sum", labels) or 0.0) > 0.0
