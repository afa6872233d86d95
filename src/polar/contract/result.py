"""What comes out: Trace, Trajectory, SessionResult. Names and shapes are those of NVIDIA's public Polar
service, with additions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polar.contract.arrays import Floats, Ids
from polar.contract.chat import Message, Tool

SessionState = Literal[
    "REGISTERED",
    "INITIALIZING",
    "READY",
    "RUNNING",
    "POST_RUN",
    "BUILDING",
    "EVALUATING",
    "COMPLETED",
    "ERROR",
    "TIMEOUT",
]
TERMINAL_STATES: frozenset[str] = frozenset({"COMPLETED", "ERROR", "TIMEOUT"})
TraceRole = Literal["main", "subagent", "auxiliary"]


class Trace(msgspec.Struct, kw_only=True):
    """One token sequence with its mask: what a trainer takes.

    ``len(response_ids) == len(loss_mask) == len(response_logprobs) == len(weight_versions)``. Where the mask
    is 0 the token is context: its logprob is 0.0 and its weight version -1. ``prompt_ids`` are never trained.
    ``loss_mask`` and ``weight_versions`` are int32 as well.
    """

    prompt_ids: Ids
    response_ids: Ids
    loss_mask: Ids
    response_logprobs: Floats
    weight_versions: Ids
    prompt_messages: tuple[Message, ...] = ()
    response_messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    finish_reason: str = "stop"
    reward: float | None = None
    role: TraceRole = "main"
    completion_ids: tuple[str, ...] = ()
    """The completions whose sampled tokens this trace trains, in order."""
    images: tuple[str, ...] = ()
    metadata: dict[str, Any] = {}


class Split(msgspec.Struct, frozen=True):
    """A completion at which a new trace begins, and why."""

    completion_id: str
    reason: str


class Reconstruction(msgspec.Struct, kw_only=True):
    """Where every captured completion went. Each id stands under exactly one fate."""

    completions: dict[str, list[str]] = {}
    tokens_trained: int = 0
    splits: list[Split] = []


class Trajectory(msgspec.Struct, kw_only=True):
    """All traces of a session."""

    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    traces: list[Trace] = []
    metadata: dict[str, Any] = {}
    """builder, api_type, model_requested, model_used, record_count, trace_count, evaluation, reconstruction,
    provenance."""
    error: str | None = None


class SessionResult(msgspec.Struct, kw_only=True):
    """The outcome of one session attempt. ``timing`` maps a stage to its seconds."""

    session_id: str
    task_id: str
    attempt: int
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    trajectory: Trajectory
    timing: dict[str, float] = {}
    node_id: str = "local"
    error: str | None = None
    metadata: dict[str, Any] = {}
