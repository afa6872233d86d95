"""The protocol of builders: the captured calls of a session to traces.

A builder decides only which completions share a trace. What a token is, what its logprob was and which
weights sampled it is the record's word, and every completion is accounted for, trained or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from polar.contract.completion import Completion
from polar.contract.result import Reconstruction, Trace


class Built(NamedTuple):
    """What a builder made: the traces in their order, and where every completion went."""

    traces: list[Trace]
    reconstruction: Reconstruction


class Builder(Protocol):
    """One way to make traces. Implement it, and name it ``module:Class`` in a task's ``builder.strategy``."""

    name: str

    def build(self, completions: Sequence[Completion]) -> Built:
        """Traces of one session attempt.

        Args:
            completions: all of the attempt's calls, in any order: the result is the same.

        Raises:
            PolarError: a completion builds on one that is not there.
        """
        ...
