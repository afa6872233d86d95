"""Keys and values of sequences, and which of them a new prompt can start from.

Calls of an agent session extend each other, and the samples of a task share their first prompt. Prefill is
by far the slowest thing a CPU does here, and copying a prefix costs a thousandth of computing it, so each
sequence owns plain contiguous memory and a shared prefix is copied. No pages, no reference counts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polar.contract.arrays import Ids, common_prefix
from polar.engines.local.config import ModelConfig

ROOM = 256
"""Memory grows by at least so many tokens."""


class KV:
    """Keys and values of one sequence's first ``length`` tokens, and the tokens themselves.

    ``buffer`` is float32 [layers, 2, kv_heads, capacity, head_dim], ``ids`` int32 [capacity].
    ``mixed`` says that the weights changed in between: good for the sequence itself (an in-flight update
    keeps its context), not for others.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self._shape = (config.layers, 2, config.kv_heads)
        self._head_dim = config.head_dim
        self.buffer = torch.empty(*self._shape, capacity, config.head_dim)
        self.ids: Ids = np.empty(capacity, dtype=np.int32)
        self.length = 0
        self.mixed = False

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        return len(self.ids)

    @property
    def known(self) -> Ids:
        """The tokens whose keys and values are here."""
        return self.ids[: self.length]

    def append(self, ids: Ids) -> tuple[Tensor, Tensor, Tensor]:
        """Make room for ``ids``; the forward that follows computes them.

        Returns views, for each layer along the first dimension: where the new keys and values go
        [layers, 2, kv_heads, n, head_dim], and all keys and all values [layers, kv_heads, length, head_dim].
        """
        start, end = self.length, self.length + len(ids)
        if end > self.capacity:
            self._grow(max(end + ROOM, end + end // 4))
        self.ids[start:end] = ids
        self.length = end
        used = self.buffer[:, :, :, :end]
        return used[:, :, :, start:], used[:, 0], used[:, 1]

    def _grow(self, capacity: int) -> None:
        buffer = torch.empty(*self._shape, capacity, self._head_dim)
        buffer[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
        self.buffer = buffer
        self.ids = np.concatenate([self.known, np.empty(capacity - self.length, dtype=np.int32)])

    def copy_from(self, other: KV, length: int) -> None:
        """Begin as a copy of another's first ``length`` tokens."""
        self.buffer[:, :, :, :length] = other.buffer[:, :, :, :length]
        self.ids[:length] = other.ids[:length]
        self.length = length


class PrefixCache:
    """Ended sequences, least recently used first, bounded in tokens."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._idle: list[KV] = []

    @property
    def tokens(self) -> int:
        """Memory that ended sequences hold, in tokens."""
        return sum(kv.capacity for kv in self._idle)

    def best(self, prompt: Ids, running: list[KV]) -> tuple[KV | None, int]:
        """The sequence, ended or running, that shares the longest prefix with ``prompt``, and how long it is.

        The last token of a prompt is never taken from a cache: the first reply token needs its logits.
        """
        best: KV | None = None
        longest = 0
        for kv in (*self._idle, *running):
            if kv.mixed:
                continue
            shared = min(common_prefix(kv.known, prompt), len(prompt) - 1)
            if shared > longest:
                best, longest = kv, shared
        return best, longest

    def start(self, prompt: Ids, running: list[KV]) -> KV:
        """Memory for a new sequence, holding as much of ``prompt`` as is known already.

        An ended sequence that the prompt continues is taken over; any other is copied from.
        """
        found, shared = self.best(prompt, running)
        if found is not None and found in self._idle:
            self._idle.remove(found)
            if shared >= found.length - 1:
                found.length = shared
                return found
            self._idle.append(found)
        kv = KV(self._config, len(prompt) + ROOM)
        if found is not None:
            kv.copy_from(found, shared)
        return kv

    def keep(self, kv: KV) -> None:
        """An ended sequence may serve others."""
        if not kv.mixed and kv.length:
            self._idle.append(kv)

    def trim(self, tokens: int) -> None:
        """Forget the least recently used until at most ``tokens`` are held."""
        held = self.tokens
        while self._idle and held > tokens:
            held -= self._idle.pop(0).capacity

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._idle.clear()
