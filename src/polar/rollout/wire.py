"""Results as trainers read them: in the shapes of NVIDIA's public Polar service.

There messages and tools are OpenAI chat objects, and ``timing`` has exactly the milliseconds that its clients know
(they refuse other keys), so ours, seconds by stage, stand in the trajectory's metadata under ``seconds``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from polar.contract.arrays import Floats, Ids
from polar.contract.result import SessionResult, Trace, TraceRole, Trajectory
from polar.contract.rollout import TaskState
from polar.store.base import SessionRecord
from polar.store.codec import dumps
from polar.trajectories.chatform import chat_messages, chat_tools


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
