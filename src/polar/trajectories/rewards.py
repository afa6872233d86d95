"""Who is rewarded. The session's outcome is the work of the agent and its sub-agents; a title or a summary
that was sampled on the side did not earn it, and would be trained towards noise.

Where traces of a session share a prefix (forks), the shared tokens are trained in one of them only, so giving
the outcome to each of them rewards no token twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar.contract.result import Trace


def assign(
    traces: Sequence[Trace],
    outcome_reward: float | None = None,
    trace_rewards: Sequence[float] | None = None,
) -> None:
    """Set the traces' rewards in place.

    Args:
        outcome_reward: for every trace but the auxiliary ones, which get ``None``.
        trace_rewards: one for each trace in order; where given, they alone count.

    Raises:
        ValueError: ``trace_rewards`` has another length than ``traces``.
    """
    if trace_rewards is not None and len(trace_rewards) != len(traces):
        raise ValueError(f"{len(trace_rewards)} trace rewards for {len(traces)} traces: give one for each")
    for index, trace in enumerate(traces):
        if trace_rewards is not None:
            trace.reward = float(trace_rewards[index])
        elif outcome_reward is None or trace.role == "auxiliary":
            trace.reward = None
        else:
            trace.reward = float(outcome_reward)
