"""What clients of NVIDIA's public service send and read: they are served as they are."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from polar.rollout.callbacks import CallbackConfig
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS, task
from tests.rollout.receiver import Receiver


class Timing(msgspec.Struct, forbid_unknown_fields=True):
    """Their clients refuse further keys."""

    register_to_init_queue_ms: float
    init_ms: float
    run_ms: float
    postrun_ms: float


class Trace(msgspec.Struct):
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    finish_reason: str | None
    response_logprobs: list[float] | None
    reward: float | None
    metadata: dict[str, Any]


class Trajectory(msgspec.Struct):
    status: str
    metadata: dict[str, Any]
    traces: list[Trace]
    error: str | None


class Result(msgspec.Struct):
    session_id: str
    task_id: str
    status: str
    trajectory: Trajectory
    timing: Timing
    node_id: str | None
    error: str | None
    metadata: dict[str, Any]


class Status(msgspec.Struct):
    task_id: str
    status: str
    results: list[Result]
    result_paths: list[str]
    total_sessions: int = 0
    completed_sessions: int = 0


def dumped(task_id: str, **fields: Any) -> dict[str, Any]:
    """A task as a client writes it that dumps every field it knows."""
    return {
        "task_id": task_id,
        "instruction": "do it",
        "num_samples": 1,
        "dispatch_priority": 0,
        "early_stop_min_usable_sessions": None,
        "timeout_seconds": 600.0,
        "runtime": None,
        "agent": {"harness": "codex", "import_path": None, "model_name": "m", "settings": {}, "env": {}},
        "builder": {"strategy": "per_request", "config": {}},
        "evaluator": {"strategy": "session_completed", "config": {}, "env": {}, "refresh_runtime": False},
        "callback_url": None,
        "metadata": {"group_id": 3, "policy_version": 7, "rollout_step": 9},
        **fields,
    }


async def test_a_bridge_that_submits_and_polls(make_world: MakeWorld) -> None:
    world = await make_world(anonymous="read")  # it polls without a credential
    await world.join()
    client = world.as_("nobody")
    answer = await client.post(
        "/rollout/task/submit", json=dumped("0-1"), headers={"X-Polar-Control-Token": TOKENS["submit"]}
    )
    assert answer.json() == {"task_id": "0-1", "status": "running"}
    status = msgspec.json.decode((await client.get("/rollout/task/0-1")).content, type=Status)
    assert (status.status, status.results, status.result_paths) == ("running", [], [])
    (lease,) = await world.claim()
    await world.finish(lease, metadata=lease["task"]["metadata"])
    status = msgspec.json.decode((await client.get("/rollout/task/0-1")).content, type=Status)
    assert (status.status, status.total_sessions, status.completed_sessions) == ("completed", 1, 1)
    (result,) = status.results
    assert result.timing.init_ms == 1500.0
    assert result.timing.run_ms == 2000.0
    assert result.timing.postrun_ms == 750.0
    assert result.metadata == {"group_id": 3, "policy_version": 7, "rollout_step": 9}
    assert result.trajectory.metadata["seconds"]["run"] == 2.0
    first, second = result.trajectory.traces  # per_request: one a call
    assert first.prompt_messages == [{"role": "user", "content": "what is 1+1?"}]
    (call,) = first.response_messages[0]["tool_calls"]
    assert call == {"id": "c0", "type": "function", "function": {"name": "calc", "arguments": '{"x": 1}'}}
    assert (first.tools or [])[0]["function"]["name"] == "calc"
    for trace in (first, second):
        assert len(trace.response_ids) == len(trace.loss_mask) == len(trace.response_logprobs or [])


async def test_a_bridge_that_waits_for_its_callback(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=CallbackConfig())
        await world.join()
        await world.run(dumped("0-2", num_samples=2, callback_url=f"{trainer.url}/callback/task_result"))
        ((path, _, body),) = await trainer.wait(1)
        assert path == "/callback/task_result"
        told = msgspec.json.decode(body, type=Status)
        assert (told.task_id, told.status, len(told.results)) == ("0-2", "completed", 2)


async def test_a_bridge_that_gives_up_on_its_task(world: World) -> None:
    await world.submit(dumped("0-3"))
    answer = await world.as_("submit").delete("/rollout/task/0-3", params={"register_if_missing": True})
    assert msgspec.json.decode(answer.content, type=Status).status == "cancelled"


async def test_an_operator_of_the_fleet(world: World) -> None:
    await world.join()
    await world.submit(task())
    status = await world.get("/rollout/status")
    assert set(status) >= {"tasks", "pipeline", "nodes"}
    (node,) = await world.get("/nodes")
    known = {
        "node_id", "gateway_url", "max_init_workers", "max_run_workers", "max_postrun_workers", "metrics", "healthy",
        "draining", "heartbeat_interval_seconds", "last_heartbeat",
    }  # fmt: skip
    assert known <= set(node)
    assert set(node["metrics"]) == {
        "init_queue_depth", "init_inflight", "ready_depth", "run_inflight", "postrun_queue_depth", "postrun_inflight",
    }  # fmt: skip
    assert json.loads((await world.admin.get("/health")).content)["status"] == "ok"
