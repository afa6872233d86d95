"""A session attempt as builders read it: its calls in order, with their roles and weight versions.

The order in which completions arrive here must not matter (a store, a journal and a test hand them over
differently), so everything is derived from ``seq``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polar.capture.graph import SessionGraph
from polar.contract.arrays import Ids
from polar.contract.completion import Completion
from polar.contract.errors import PolarError
from polar.contract.result import TraceRole
from polar.trajectories.roles import assign_roles

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Session:
    """``completions`` in order of ``seq``; ``versions`` maps the engine's version names to numbers."""

    completions: list[Completion]
    graph: SessionGraph
    roles: dict[str, TraceRole]
    versions: dict[str, int]

    def role(self, completion: Completion) -> TraceRole:
        """The role of one of its completions."""
        return self.roles[completion.completion_id]

    def weight_versions(self, completion: Completion) -> Ids:
        """The weight version of each response token (int32, shape [response]); 0 where none is known."""
        versions = np.zeros(len(completion.response_ids), dtype=np.int32)
        for span in completion.weight_spans:
            versions[span.start : span.end] = self.versions[span.version]
        return versions

    def named_versions(self, completions: Sequence[Completion]) -> dict[str, int]:
        """The version names among these completions that are no numbers, with the number each one got."""
        names = (span.version for c in completions for span in c.weight_spans)
        return {name: self.versions[name] for name in names if _number(name) is None}


def read_session(completions: Sequence[Completion]) -> Session:
    """Put a session attempt in order.

    Raises:
        PolarError: a completion builds on one that is not there.
    """
    ordered = sorted(completions, key=lambda completion: completion.seq)
    graph = SessionGraph()
    for completion in ordered:
        if completion.base_id is not None and graph.get(completion.base_id) is None:
            raise PolarError(
                f"completion {completion.completion_id} builds on {completion.base_id}, which is not among "
                "the session's completions: hand over all completions of the attempt"
            )
        graph.add(completion)
    ordered = graph.completions()
    return Session(ordered, graph, assign_roles(graph, ordered), _number_versions(ordered))


def is_trainable(completion: Completion) -> bool:
    """Whether its sampled tokens may be trained: the reply is whole and verified, and there is one."""
    return completion.outcome == "ok" and len(completion.response_ids) > 0


def _number_versions(completions: Sequence[Completion]) -> dict[str, int]:
    """A number for each version name: its own, or the next ordinal in order of first appearance."""
    names = dict.fromkeys(span.version for completion in completions for span in completion.weight_spans)
    numbers = {name: number for name in names if (number := _number(name)) is not None}
    following = max(numbers.values(), default=-1) + 1
    for name in names:
        if name not in numbers:
            numbers[name] = following
            following += 1
    return numbers


def _number(name: str) -> int | None:
    """The name as an int32 version number, if it is one."""
    if not (name.isascii() and name.isdigit()) or int(name) >= _INT32_MAX:
        return None
    return int(name)
