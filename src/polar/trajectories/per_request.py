"""One trace a call: for trainers that take single turns, and to look at what was captured.

Every trace repeats the whole prompt of its call, so a session grows with turns times tokens: prefer
``prefix_merging`` for anything long.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from polar.contract.completion import Completion
from polar.contract.result import Split
from polar.trajectories.base import Built
from polar.trajectories.fates import reconstruct
from polar.trajectories.session import is_trainable, read_session
from polar.trajectories.trace import Step, make_trace


class PerRequestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """It has nothing to set."""


class PerRequest:
    """The builder ``per_request``."""

    name = "per_request"

    def build(self, completions: Sequence[Completion]) -> Built:
        session = read_session(completions)
        trained = [completion for completion in session.completions if is_trainable(completion)]
        traces = [
            make_trace(session, [Step(c, session.graph.prompt_ids(c), trained=True)], session.role(c))
            for c in trained
        ]
        splits = [Split(c.completion_id, c.split or "per_request") for c in trained[1:]]
        return Built(traces, reconstruct(session, traces, splits))
