"""A session's completions to its trajectory, with the report that says what became of each of them.

The trajectory is built before it is scored (evaluators look at it), so the evaluation is a step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from polar.contract.arrays import to_plain
from polar.contract.completion import Completion
from polar.contract.result import Reconstruction, Trace, Trajectory
from polar.contract.task import BuilderSpec
from polar.trajectories import make_builder, rewards
from polar.trajectories.session import is_trainable
from polar.trajectories.weights import note_staleness


def assemble(
    completions: Sequence[Completion],
    builder: BuilderSpec,
    *,
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"] = "COMPLETED",
    error: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    policy_version: object = None,
    allow_import: bool = False,
) -> Trajectory:
    """The trajectory of one session attempt, without rewards.

    ``metadata["merge_factor"]`` is how many trained completions a trace has on average (0.0 without traces);
    ``metadata["warnings"]`` are lines on what would mislead a trainer, and on what calls asked for and did not get.

    Args:
        policy_version: the task's ``metadata.policy_version``, from which the staleness of traces counts.

    Raises:
        UsageError: no such builder, or a config that it does not take.
        PolarError: a completion builds on one that is not there.
    """
    traces, reconstruction = make_builder(builder, allow_import).build(completions)
    note_staleness(traces, policy_version)
    trained = sum(len(trace.completion_ids) for trace in traces)
    shown = _representative(completions, traces)
    return Trajectory(
        status=status,
        traces=traces,
        error=error,
        metadata={
            "builder": builder.strategy,
            "api_type": shown.dialect if shown else None,
            "model_requested": shown.model_requested if shown else None,
            "model_used": shown.model_used if shown else None,
            "record_count": len(completions),
            "trace_count": len(traces),
            "merge_factor": trained / len(traces) if traces else 0.0,
            "warnings": _warnings(completions),
            "reconstruction": to_plain(reconstruction),
            "provenance": dict(provenance or {}),
        },
    )


def unbuilt(completions: Sequence[Completion], builder: BuilderSpec, provenance: Mapping[str, Any]) -> Trajectory:
    """The trajectory of an attempt whose traces could not be built: none, and every call accounted for."""
    reconstruction = Reconstruction(completions={"not_built": [c.completion_id for c in completions]})
    return Trajectory(
        status="ERROR",
        metadata={
            "builder": builder.strategy,
            "record_count": len(completions),
            "trace_count": 0,
            "merge_factor": 0.0,
            "reconstruction": to_plain(reconstruction),
            "provenance": dict(provenance),
        },
    )


def record_evaluation(
    trajectory: Trajectory,
    *,
    outcome_reward: float | None = None,
    trace_rewards: Sequence[float] | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> None:
    """Set the rewards and ``metadata["evaluation"]`` of a trajectory in place; the evaluation's own warning joins
    ``metadata["warnings"]``.

    Raises:
        ValueError: ``trace_rewards`` has not one reward for each trace.
    """
    rewards.assign(trajectory.traces, outcome_reward, trace_rewards)
    told = {**(evaluation or {}), "outcome_reward": outcome_reward}
    trajectory.metadata["evaluation"] = told
    if isinstance(warning := told.get("warning"), str):
        before = trajectory.metadata.get("warnings") or []
        trajectory.metadata["warnings"] = list(dict.fromkeys([*before, warning]))


def _warnings(completions: Sequence[Completion]) -> list[str]:
    """What the calls that may be trained say of their logprobs and weight versions, and then what any call asked for
    and did not get; each line once."""
    trainable = [completion.metadata for completion in completions if is_trainable(completion)]
    lines = [m.get(name) for name in ("logprobs_warning", "weight_version_warning") for m in trainable]
    lines += [line for completion in completions for line in completion.metadata.get("warnings", ())]
    return list(dict.fromkeys(line for line in lines if line))


def _representative(completions: Sequence[Completion], traces: Sequence[Trace]) -> Completion | None:
    """The completion whose dialect and models stand for the session: the first that main trains, else the
    first of all."""
    main = next((trace.completion_ids[0] for trace in traces if trace.role == "main"), None)
    ordered = sorted(completions, key=lambda completion: completion.seq)
    return next((c for c in ordered if c.completion_id == main), ordered[0] if ordered else None)
