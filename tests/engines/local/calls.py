"""One call of an engine, read to its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polar.contract.arrays import Ids, ids
from polar.contract.chat import FinishReason, Sampling
from polar.engines.local import LocalEngine


@dataclass
class Reply:
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


async def call(engine: LocalEngine, prompt: Iterable[int], *, stop_ids: Iterable[int] = (), **sampling: Any) -> Reply:
    reply = Reply()
    stream = engine.generate(
        ids(prompt), Sampling(**sampling), stop_ids=frozenset(stop_ids), request_id="r", affinity="s"
    )
    async for chunk in stream:
        reply.ids += chunk.ids
        reply.logprobs += chunk.logprobs
        reply.versions += [chunk.weight_version] * len(chunk.ids)
        reply.cached_tokens = chunk.cached_tokens
        reply.finish_reason = chunk.finish_reason
    return reply


def prompt_of(length: int, seed: int = 0) -> Ids:
    """A random prompt over the tiny vocabulary."""
    return np.random.default_rng(seed).integers(0, 97, length).astype(np.int32)


async def scored(engine: LocalEngine, prompt: Ids, reply: Reply, temperature: float = 1.0) -> list[float]:
    """What the engine's weights say now about a reply's tokens."""
    scores = await engine.score(np.concatenate([prompt, ids(reply.ids)]), temperature)
    return scores[len(prompt) :].tolist()
