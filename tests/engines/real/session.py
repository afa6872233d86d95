"""One session of a few turns, the same for every engine, and what a trainer gets from it. At temperature 0, so that
engines of one model can be held against each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from polar.contract.result import Trace, Trajectory

TURNS = ("What is the capital of France?", "And of Italy?", "Which of the two is larger?")


@dataclass(frozen=True)
class Kind:
    """What does not depend on arithmetic: per trace its role, its prompt and the runs of its mask (mask, tokens)."""

    traces: tuple[tuple[str, tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    fates: tuple[tuple[str, int], ...]


async def hold(world: Any, *, temperature: float = 0.0, max_tokens: int = 12, stream: bool = False) -> list[str]:
    """Three turns in one conversation, each after the reply before it; the replies."""
    messages: list[dict[str, str]] = []
    replies = []
    async with world.client() as client:
        for question in TURNS:
            messages.append({"role": "user", "content": question})
            asked = {"model": "any", "messages": messages, "temperature": temperature, "max_tokens": max_tokens}
            reply = await client.chat.completions.create(**asked, stream=stream)
            text = await _joined(reply) if stream else reply.choices[0].message.content
            replies.append(text)
            messages.append({"role": "assistant", "content": text})
    return replies


def kind_of(trajectory: Trajectory) -> Kind:
    """See ``Kind``."""
    fates = trajectory.metadata["reconstruction"]["completions"]
    return Kind(
        tuple((trace.role, tuple(trace.prompt_ids.tolist()), _runs(trace)) for trace in trajectory.traces),
        tuple(sorted((fate, len(completions)) for fate, completions in fates.items())),
    )


def whole(trace: Trace) -> list[int]:
    """All ids of a trace."""
    ids: list[int] = np.concatenate([trace.prompt_ids, trace.response_ids]).tolist()
    return ids


def trained(trace: Trace) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which ids of ``whole`` are trained."""
    return np.concatenate([np.zeros(len(trace.prompt_ids), dtype=bool), trace.loss_mask == 1])


def _runs(trace: Trace) -> tuple[tuple[int, int], ...]:
    return tuple((int(mask), len(list(run))) for mask, run in groupby(trace.loss_mask.tolist()))


async def _joined(stream: AsyncIterator[Any]) -> str:
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
