"""Why: off-policy correction and filtering go by how old the weights were that a token was sampled from. A trace
says it in two numbers, and how far that is behind the policy that the task asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polar.contract.completion import Completion
from polar.contract.result import Trace
from polar.trajectories.session import Session


def weight_range(session: Session, trained: Sequence[Completion]) -> dict[str, Any]:
    """``weight_version_min`` and ``weight_version_max`` of what these completions sampled, and
    ``weight_version_names`` with the number of each name that is none. Empty where no version is known."""
    numbers = [session.versions[span.version] for completion in trained for span in completion.weight_spans]
    if not numbers:
        return {}
    found: dict[str, Any] = {"weight_version_min": min(numbers), "weight_version_max": max(numbers)}
    names = session.named_versions(trained)
    return {**found, "weight_version_names": names} if names else found


def note_staleness(traces: Sequence[Trace], policy_version: object) -> None:
    """Set ``metadata["staleness"]`` of each trace in place: ``policy_version`` of the task less the oldest version
    that it trains (below 0 where all of it is newer). Only where both are numbers."""
    try:
        asked = int(str(policy_version))
    except ValueError:
        return
    for trace in traces:
        oldest = trace.metadata.get("weight_version_min")
        if oldest is not None and not trace.metadata.get("weight_version_names"):
            trace.metadata["staleness"] = asked - oldest


class WeightSummary:
    """What a run's traces were sampled from, summed up trace by trace."""

    def __init__(self) -> None:
        self._tokens: Counter[str] = Counter()
        self._mixed = 0
        self._staleness: list[int] = []

    def add(self, trace: Trace) -> None:
        """Count one trace."""
        metadata: Mapping[str, Any] = trace.metadata
        if metadata.get("weight_version_min") is None:
            return
        names = {number: name for name, number in metadata.get("weight_version_names", {}).items()}
        for version, count in zip(
            *np.unique(trace.weight_versions[trace.loss_mask == 1], return_counts=True), strict=True
        ):
            self._tokens[names.get(int(version), str(version))] += int(count)
        self._mixed += metadata["weight_version_min"] != metadata["weight_version_max"]
        if "staleness" in metadata:
            self._staleness.append(metadata["staleness"])

    def body(self) -> dict[str, Any]:
        """Trained tokens by version, traces with several versions, and the staleness of traces where it is known."""
        found: dict[str, Any] = {"tokens_by_version": dict(self._tokens), "mixed_traces": self._mixed}
        if self._staleness:
            mean = round(sum(self._staleness) / len(self._staleness), 3)
            found["staleness"] = {"min": min(self._staleness), "mean": mean, "max": max(self._staleness)}
        return found
