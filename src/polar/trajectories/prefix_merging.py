"""Chains of exact token prefixes: a multi-turn agent becomes one trace a conversation, not one a call.

A completion follows another in a trace only if its prompt begins with exactly the other's prompt and sampled
reply, so every trained token stands behind what the engine had in context. Exact prefixes form a tree. Each
role (main, sub-agent, auxiliary) gets its own traces from it, because they are rewarded differently: from the
root to each of the role's last completions. Where the tree forks, the longest branch owns what is shared, and
then the earliest; the other traces have the shared part in their prompt. A completion that may not be
trained, or that another trace trains, is context.

``drift: splice`` also joins across a reply that was re-tokenized on its way back into the prompt: the sampled
ids stay, and the rest of the prompt follows them. Such a trace is marked ``context_exact: false``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from polar.contract.arrays import Ids
from polar.contract.completion import Completion
from polar.contract.result import Split, Trace, TraceRole
from polar.trajectories.base import Built
from polar.trajectories.fates import reconstruct
from polar.trajectories.roles import ROLES
from polar.trajectories.session import Session, is_trainable, read_session
from polar.trajectories.trace import Step, make_trace


class PrefixMergingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``end_of_turn_token_id`` ends a re-tokenized reply inside the next prompt (``drift: splice``); without it
    the last sampled id of a reply that ended by itself is looked for."""

    drift: Literal["split", "splice"] = "split"
    end_of_turn_token_id: int | None = None
    include_roles: tuple[TraceRole, ...] = ROLES


@dataclass(frozen=True, slots=True)
class _Edge:
    """A completion follows ``parent`` in a trace, after the ids of ``bridge``."""

    parent: Completion
    bridge: Ids
    drifted: int = 0


@dataclass(frozen=True, slots=True)
class _Chain:
    """A trace to be: ``own`` are its completions, ``context`` stands before them, root first."""

    context: list[Completion]
    own: list[Completion]
    role: TraceRole


class PrefixMerging:
    """The builder ``prefix_merging``."""

    name = "prefix_merging"

    def __init__(self, config: PrefixMergingConfig | None = None) -> None:
        self._config = config or PrefixMergingConfig()

    def build(self, completions: Sequence[Completion]) -> Built:
        session = read_session(completions)
        edges = self._edges(session)
        made: list[tuple[int, Trace, str]] = []
        for role in ROLES:
            if role not in self._config.include_roles:
                continue
            for chain in _chains(session, edges, role):
                first = next(c for c in chain.own if _trains(session, c, role))
                trace = make_trace(session, _steps(session, edges, chain), role)
                made.append((first.seq, trace, _reason(session, edges, chain)))
        made.sort(key=lambda item: item[0])
        traces = [trace for _, trace, _ in made]
        splits = [Split(trace.completion_ids[0], reason) for _, trace, reason in made[1:]]
        return Built(traces, reconstruct(session, traces, splits))

    def _edges(self, session: Session) -> dict[str, _Edge]:
        """Which completion follows which, by the id of the one that follows."""
        edges: dict[str, _Edge] = {}
        for completion in session.completions:
            parent = session.graph.get(completion.parent_id) if completion.parent_id else None
            if parent is None:
                continue
            if completion.shared == parent.total_len > 0:
                edges[completion.completion_id] = _Edge(parent, completion.prompt_delta)
            elif self._config.drift == "splice":
                edge = self._splice(parent, completion)
                if edge is not None:
                    edges[completion.completion_id] = edge
        return edges

    def _splice(self, parent: Completion, completion: Completion) -> _Edge | None:
        """Join across a re-tokenized reply, if its end is found in the prompt."""
        if not is_trainable(parent) or completion.shared < parent.prompt_len:
            return None
        end = self._config.end_of_turn_token_id
        if end is None:
            if parent.finish_reason not in ("stop", "tool_calls"):
                return None
            end = int(parent.response_ids[-1])
        kept = completion.shared - parent.prompt_len
        after_prompt = np.concatenate([parent.response_ids[:kept], completion.prompt_delta])
        ends = np.flatnonzero(after_prompt == end)
        if not len(ends):
            return None
        return _Edge(parent, after_prompt[int(ends[0]) + 1 :], len(parent.response_ids) - kept)


def _trains(session: Session, completion: Completion, role: TraceRole) -> bool:
    return is_trainable(completion) and session.role(completion) == role


def _chains(session: Session, edges: dict[str, _Edge], role: TraceRole) -> list[_Chain]:
    """The tree of one role as chains: each goes down by its longest branch to something trained."""
    height: dict[str, int] = {}
    heir: dict[str, Completion] = {}
    for completion in reversed(session.completions):
        name = completion.completion_id
        below = heir.get(name)
        height[name] = (height[below.completion_id] if below else 0) + _trains(session, completion, role)
        edge = edges.get(name)
        if edge is None or not height[name]:
            continue
        rival = heir.get(edge.parent.completion_id)
        if rival is None or height[name] >= height[rival.completion_id]:
            heir[edge.parent.completion_id] = completion  # going backwards, so a tie goes to the earlier
    chains: list[_Chain] = []
    for completion in session.completions:
        name = completion.completion_id
        edge = edges.get(name)
        if height[name] and (edge is None or heir[edge.parent.completion_id] is not completion):
            chains.append(_Chain(_ancestors(edges, completion), _descend(heir, completion), role))
    return chains


def _ancestors(edges: dict[str, _Edge], completion: Completion) -> list[Completion]:
    path: list[Completion] = []
    while (edge := edges.get(completion.completion_id)) is not None:
        completion = edge.parent
        path.append(completion)
    return path[::-1]


def _descend(heir: dict[str, Completion], completion: Completion) -> list[Completion]:
    path = [completion]
    while (below := heir.get(path[-1].completion_id)) is not None:
        path.append(below)
    return path


def _steps(session: Session, edges: dict[str, _Edge], chain: _Chain) -> list[Step]:
    """The whole way from the root, of which only the chain's own completions of its role are trained."""
    steps: list[Step] = []
    for completion in chain.context + chain.own:
        edge = edges.get(completion.completion_id)
        trained = len(steps) >= len(chain.context) and _trains(session, completion, chain.role)
        if edge is None:
            steps.append(Step(completion, session.graph.prompt_ids(completion), trained))
        else:
            steps.append(Step(completion, edge.bridge, trained, edge.drifted))
    return steps


def _reason(session: Session, edges: dict[str, _Edge], chain: _Chain) -> str:
    """Why this chain does not go on an earlier trace."""
    for completion in chain.own:
        if _trains(session, completion, chain.role):
            break
        if is_trainable(completion):
            return "role_changed"
    begin = chain.own[0]
    if begin.completion_id in edges:
        return "fork"
    return begin.split or "new_conversation"
