"""Which tokens go into the next forward: continuous batching with chunked prefill.

Each step takes one token of every sequence that is decoding and a bounded piece of the prompts that are
not computed yet, first come first served, so a long prompt slows the others a little and stops none. All of
this runs in one thread and knows nothing of asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import torch

from polar.contract.arrays import Floats, Ids, common_prefix
from polar.contract.chat import FinishReason
from polar.engines.base import EngineError, TokenChunk
from polar.engines.local.kv import KV, PrefixCache
from polar.engines.local.packed import PackedModel, Piece
from polar.engines.local.sampler import Sampler, sample

PREFILL_ALONE = 512
"""Prompt tokens a step when nothing is decoding."""

PREFILL_BESIDE = 128
"""Prompt tokens a step beside decoding sequences: about as long as a decoding step of a full batch."""

WORTH_WAITING = 32
"""A prompt waits for another's prefill if that will give it so many tokens more than what is cached now."""


@dataclass(eq=False, slots=True)
class Call:
    """One generation. ``emit`` takes its chunks, or the error that ended it."""

    prompt: Ids
    sampler: Sampler
    stop_ids: frozenset[int]
    max_tokens: int
    emit: Callable[[TokenChunk | EngineError], None]
    cancelled: bool = False
    kv: KV | None = None
    cached: int = 0
    sampled: int = 0
    last: Ids = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    """The token sampled last [1]: it goes into the next forward."""

    @property
    def need(self) -> int:
        """Tokens that it may come to hold."""
        return len(self.prompt) + self.max_tokens

    @property
    def decoding(self) -> bool:
        """The prompt is computed."""
        return self.sampled > 0


class Scheduler:
    """The calls, their memory and the weights.

    Args:
        model: the weights to begin with.
        version: their name.
        max_running: calls that are computed at once; the rest wait in order.
        kv_tokens: bound on what running calls may come to hold plus what is kept of ended ones, in tokens. A
            call that alone exceeds it runs alone.
    """

    def __init__(self, model: PackedModel, version: str, *, max_running: int, kv_tokens: int) -> None:
        self._model = model
        self._version = version
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._waiting: deque[Call] = deque()
        self._running: list[Call] = []
        self._cache = PrefixCache(model.config)

    @property
    def busy(self) -> bool:
        """There is something to do."""
        return bool(self._waiting or self._running)

    @property
    def calls(self) -> list[Call]:
        """Every call that has not ended."""
        return [*self._running, *self._waiting]

    def add(self, call: Call) -> None:
        """Put a call at the end of the queue."""
        self._waiting.append(call)

    def load(self, model: PackedModel, version: str) -> None:
        """Go on with other weights. Running calls keep their context as it was computed; no new call uses it."""
        self._model, self._version = model, version
        self._cache.clear()
        for kv in self._memory():
            kv.mixed = True

    def step(self) -> None:
        """One forward: a token for each decoding call, and some prefill."""
        self._drop_cancelled()
        self._admit()
        plan = self._plan()
        if not plan:
            return
        hidden = self._model.hidden([piece for _, piece in plan])
        ends = np.cumsum([len(piece.ids) for _, piece in plan]) - 1
        ready = [(call, int(row)) for (call, piece), row in zip(plan, ends, strict=True) if _complete(call, piece)]
        if not ready:
            return
        logits = self._model.logits(hidden[[row for _, row in ready]])
        calls = [call for call, _ in ready]
        tokens, logprobs = sample(logits, [call.sampler for call in calls])
        for call, token, logprob in zip(calls, tokens, logprobs, strict=True):
            self._advance(call, token, logprob)

    def score(self, ids: Ids, temperature: float) -> Floats:
        """Logprob of each token given those before it, float32 [n]; the first is 0."""
        kv = KV(self._model.config, len(ids))
        scores = np.zeros(len(ids), dtype=np.float32)
        for start in range(0, len(ids) - 1, PREFILL_ALONE):
            piece = ids[start : min(start + PREFILL_ALONE, len(ids) - 1)]
            hidden = self._model.hidden([Piece(piece, kv)])
            logprobs = (self._model.logits(hidden) / temperature).log_softmax(-1)
            following = torch.from_numpy(ids[start + 1 : start + 1 + len(piece)]).long()
            scores[start + 1 : start + 1 + len(piece)] = logprobs.gather(1, following[:, None])[:, 0].numpy()
        return scores

    def _memory(self) -> list[KV]:
        return [call.kv for call in self._running if call.kv is not None]

    def _drop_cancelled(self) -> None:
        for call in [c for c in self._running if c.cancelled]:
            self._end(call)
        if any(call.cancelled for call in self._waiting):
            self._waiting = deque(call for call in self._waiting if not call.cancelled)

    def _end(self, call: Call) -> None:
        self._running.remove(call)
        if call.kv is not None:
            self._cache.keep(call.kv)
        self._trim()

    def _trim(self) -> None:
        self._cache.trim(self._kv_tokens - sum(call.need for call in self._running))

    def _admit(self) -> None:
        held = sum(call.need for call in self._running)
        while self._waiting and len(self._running) < self._max_running:
            if self._running and held + self._waiting[0].need > self._kv_tokens:
                return
            call = self._waiting.popleft()
            held += call.need
            self._running.append(call)

    def _plan(self) -> list[tuple[Call, Piece]]:
        plan = [(call, Piece(call.last, call.kv)) for call in self._running if call.decoding and call.kv]
        room = PREFILL_BESIDE if plan else PREFILL_ALONE
        begun: list[Call] = []
        for call in self._running:
            if call.decoding or room <= 0:
                continue
            if call.kv is None:
                if self._soon_cached(call, begun):
                    continue
                call.kv = self._cache.start(call.prompt, self._memory())
                call.cached = call.kv.length
                self._trim()
            piece = call.prompt[call.kv.length : call.kv.length + room]
            room -= len(piece)
            begun.append(call)
            plan.append((call, Piece(piece, call.kv)))
        return plan

    def _soon_cached(self, call: Call, begun: Sequence[Call]) -> bool:
        """Another call of this step is computing a prefix of this one's prompt: copying it will be cheaper."""
        shared = [common_prefix(c.prompt, call.prompt) for c in begun if c.kv and not c.kv.mixed]
        if not shared:
            return False
        _, now = self._cache.best(call.prompt, self._memory())
        return min(max(shared), len(call.prompt) - 1) >= now + WORTH_WAITING

    def _advance(self, call: Call, token: int, logprob: float) -> None:
        if not isfinite(logprob):
            self._end(call)
            call.emit(EngineError("internal", "the model's logits are not finite numbers; check the weights"))
            return
        call.sampled += 1
        call.last = np.array([token], dtype=np.int32)
        reason: FinishReason | None = None
        if token in call.stop_ids:
            reason = "stop"
        elif call.sampled >= call.max_tokens:
            reason = "length"
        if reason:
            self._end(call)
        call.emit(TokenChunk([token], [logprob], self._version, reason, call.cached))


def _complete(call: Call, piece: Piece) -> bool:
    """After this piece the call's next token can be sampled."""
    return piece.kv.length >= len(call.prompt) or call.decoding
