"""Why: a test must be able to say what logprob the engine meant for a token without asking the code under test.

The scripted engine's logprob of a token is a function of everything in context before it and of the token:
``-(k + 1) / 8192``, with ``k`` the first 16 bits of BLAKE2b over the ids as little-endian int32. All such
values lie in [-8, -1/8192] and are exact in float32, so tests compare with ``==``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def logprobs(context: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """Logprobs of ``sampled``, each after ``context`` and the ones before it."""
    digest = hashlib.blake2b(_bytes(context))
    out: list[float] = []
    for token in sampled:
        digest.update(_bytes([token]))
        k = int.from_bytes(digest.copy().digest()[:2], "little")
        out.append(-(k + 1) / 8192)
    return out


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()
