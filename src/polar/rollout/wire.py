"""Results as trainers read them: in the shapes of NVIDIA's public Polar service.

There messages and tools are OpenAI chat objects, and ``timing`` has exactly the milliseconds that its clients know
(they refuse other keys), so ours, seconds by stage, stand in the trajectory's metadata under ``seconds``.

Two things that its trainer can't know otherwise are said in each result. It trains on a session that ran out of the
agent's own time only where a trace's ``training_filter`` tells it to. And it takes no reward for a reward of 0, so an
auxiliary trace without one would be trained as a failure: the mask of such a trace is all 0. What was sampled in it
stands in ``wire_trajectory`` and in the exports, unchanged.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import Floats, Ids
from polar.contract.result import SessionResult, Trace, TraceRole, Trajectory
from polar.contract.rollout import TaskState
from polar.store.base import SessionRecord
from polar.store.codec import dumps
from polar.trajectories.chatform import chat_messages, chat_tools

AGENT_TIMEOUT = {"reason": "agent_timeout", "trainable": True, "masked": False}
AUXILIARY = {"reason": "auxiliary", "trainable": False, "masked": True}


class WireTiming(msgspec.Struct, kw_only=True):
    """Milliseconds by stage."""

    register_to_init_queue_ms: float = 0.0
    init_ms: float = 0.0
    run_ms: float = 0.0
    postrun_ms: float = 0.0


class WireTrace(msgspec.Struct, kw_only=True):
    """A ``Trace`` whose messages and tools are OpenAI chat objects."""

    prompt_ids: Ids
    response_ids: Ids
    loss_mask: Ids
    response_logprobs: Floats
    weight_versions: Ids
    prompt_messages: list[dict[str, Any]]
    response_messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    finish_reason: str
    reward: float | None
    role: TraceRole
    completion_ids: tuple[str, ...]
    images: tuple[str, ...]
    metadata: dict[str, Any]


class WireTrajectory(msgspec.Struct, kw_only=True):
    """A ``Trajectory`` of such traces."""

    status: str
    traces: list[WireTrace]
    metadata: dict[str, Any]
    error: str | None


class WireResult(msgspec.Struct, kw_only=True):
    """A ``SessionResult`` of such a trajectory."""

    session_id: str
    task_id: str
    attempt: int
    status: str
    trajectory: WireTrajectory
    timing: WireTiming
    node_id: str
    error: str | None
    metadata: dict[str, Any]


class WireTaskStatus(msgspec.Struct, kw_only=True):
    """A ``TaskStatus`` of such results."""

    task_id: str
    status: TaskState
    total_sessions: int
    completed_sessions: int
    results: list[WireResult] = []
    result_paths: list[str] = []


def wire_result(result: SessionResult, record: SessionRecord | None = None) -> WireResult:
    """A result for the wire.

    Args:
        record: its session, which knows since when it had waited.
    """
    trajectory = wire_trajectory(result.trajectory)
    _filter(trajectory)
    trajectory.metadata = {**trajectory.metadata, "seconds": result.timing}
    return WireResult(
        session_id=result.session_id,
        task_id=result.task_id,
        attempt=result.attempt,
        status=result.status,
        trajectory=trajectory,
        timing=_milliseconds(result, record),
        node_id=result.node_id,
        error=result.error,
        metadata=result.metadata,
    )


def wire_trajectory(trajectory: Trajectory) -> WireTrajectory:
    """A trajectory for the wire."""
    return WireTrajectory(
        status=trajectory.status,
        traces=[_trace(trace) for trace in trajectory.traces],
        metadata=trajectory.metadata,
        error=trajectory.error,
    )


def encode(value: Any) -> bytes:
    """JSON bytes of anything that goes out."""
    return dumps(value)


def _trace(trace: Trace) -> WireTrace:
    same = ("finish_reason", "reward", "role", "completion_ids", "images", "metadata")
    arrays = ("prompt_ids", "response_ids", "loss_mask", "response_logprobs", "weight_versions")
    return WireTrace(
        prompt_messages=chat_messages(trace.prompt_messages),
        response_messages=chat_messages(trace.response_messages),
        tools=chat_tools(trace.tools),
        **{name: getattr(trace, name) for name in same + arrays},
    )


def _filter(trajectory: WireTrajectory) -> None:
    """Say of each trace what a trainer is to know of it, in place."""
    agent = trajectory.metadata.get("agent_result") or {}
    timed_out = trajectory.status == "TIMEOUT" and agent.get("timeout_source") == "agent"
    for trace in trajectory.traces:
        if trace.role == "auxiliary" and trace.reward is None:
            _mask(trace)
            trace.metadata = {**trace.metadata, "training_filter": AUXILIARY}
        elif timed_out and trace.loss_mask.any():
            trace.metadata = {**trace.metadata, "training_filter": AGENT_TIMEOUT}
    if trajectory.traces and "reconstruction" in trajectory.metadata:
        tokens = sum(int(trace.loss_mask.sum()) for trace in trajectory.traces)
        reconstruction = {**trajectory.metadata["reconstruction"], "tokens_trained": tokens}
        trajectory.metadata = {**trajectory.metadata, "reconstruction": reconstruction}


def _mask(trace: WireTrace) -> None:
    trace.loss_mask = np.zeros_like(trace.loss_mask)
    trace.response_logprobs = np.zeros_like(trace.response_logprobs)
    trace.weight_versions = np.full_like(trace.weight_versions, -1)


def _milliseconds(result: SessionResult, record: SessionRecord | None) -> WireTiming:
    seconds = result.timing
    started = (result.trajectory.metadata.get("provenance") or {}).get("started_at")
    queued = seconds.get("queue")
    if queued is None:
        queued = max(0.0, started - record.created_at) if record is not None and started else 0.0
    after = seconds.get("post_run", seconds.get("build", 0.0) + seconds.get("evaluate", 0.0))
    return WireTiming(
        register_to_init_queue_ms=round(queued * 1000, 3),
        init_ms=round(seconds.get("init", 0.0) * 1000, 3),
        run_ms=round(seconds.get("run", 0.0) * 1000, 3),
        postrun_ms=round(after * 1000, 3),
    )
