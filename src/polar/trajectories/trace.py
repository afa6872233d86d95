"""One trace from a chain of calls: the ids are laid end to end once, and the mask over them.

A chain is a list of steps, each a completion with the ids that stand between the reply before it and its own
(the *bridge*; for the first step, its whole prompt). What stands before the first trained reply is the
trace's prompt. Nothing is ever encoded here: every id comes from the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polar.contract.arrays import Ids
from polar.contract.chat import Image, Message
from polar.contract.completion import Completion
from polar.contract.result import Trace, TraceRole
from polar.trajectories.session import Session
from polar.trajectories.weights import weight_range


@dataclass(frozen=True, slots=True)
class Step:
    """A call in a chain. ``drifted`` counts the sampled ids of the reply before it that the engine had in
    another form when it sampled this one (0: the context is exact)."""

    completion: Completion
    bridge: Ids
    trained: bool
    drifted: int = 0


def make_trace(session: Session, steps: Sequence[Step], role: TraceRole) -> Trace:
    """Lay a chain end to end.

    Args:
        steps: root to leaf; the last one is trained.
    """
    ids = np.concatenate([piece for step in steps for piece in (step.bridge, step.completion.response_ids)])
    spans = _spans(steps)
    trained = [step.completion for step in steps if step.trained]
    cut = spans[0][0]
    length = len(ids) - cut
    mask = np.zeros(length, dtype=np.int32)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    for (start, end), completion in zip(spans, trained, strict=True):
        mask[start - cut : end - cut] = 1
        logprobs[start - cut : end - cut] = completion.logprobs
        versions[start - cut : end - cut] = session.weight_versions(completion)
    conversation = session.graph.conversation(trained[-1])
    reply_at = [c.shared_messages + len(c.messages) for c in trained]
    replies = [[at - reply_at[0], start - cut, end - cut] for at, (start, end) in zip(reply_at, spans, strict=True)]
    return Trace(
        prompt_ids=ids[:cut],
        response_ids=ids[cut:],
        loss_mask=mask,
        response_logprobs=logprobs,
        weight_versions=versions,
        prompt_messages=tuple(conversation[: reply_at[0]]),
        response_messages=tuple(conversation[reply_at[0] :]),
        tools=trained[-1].tools,
        finish_reason=trained[-1].finish_reason,
        role=role,
        completion_ids=tuple(completion.completion_id for completion in trained),
        images=_images(conversation),
        metadata=_metadata(session, trained, sum(step.drifted for step in steps), replies),
    )


def _spans(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Where the trained replies stand in the ids of the whole chain: ``[start, end)`` each."""
    spans: list[tuple[int, int]] = []
    position = 0
    for step in steps:
        start = position + len(step.bridge)
        position = start + len(step.completion.response_ids)
        if step.trained:
            spans.append((start, position))
    return spans


def _metadata(
    session: Session, trained: Sequence[Completion], drifted: int, replies: list[list[int]]
) -> dict[str, Any]:
    """``replies`` says, for each of the trace's ``completion_ids``, which of ``response_messages`` it sampled
    and which response tokens those are: ``[message, start, end)``."""
    metadata: dict[str, Any] = {
        "context_exact": drifted == 0,
        "model": trained[-1].model_used,
        "dialect": trained[-1].dialect,
        "replies": replies,
    }
    if drifted:
        metadata["drifted_tokens"] = drifted
    temperatures = {completion.sampling.temperature for completion in trained}
    if len(temperatures) == 1 and None not in temperatures:
        metadata["temperature"] = temperatures.pop()
    logprobs = {completion.metadata.get("logprobs") for completion in trained} - {None}
    if logprobs:
        metadata["logprobs"] = logprobs.pop() if len(logprobs) == 1 else "mixed"
    return {**metadata, **weight_range(session, trained)}


def _images(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(
        part.url
        for message in messages
        if not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, Image)
    )
