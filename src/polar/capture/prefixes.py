"""Why: a client that sends plain prompts says nothing of which call goes on which; only the tokens tell. This finds
the longest known sequence that a new one begins with, in one pass over it, however many are known.
"""

from __future__ import annotations

import hashlib
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefixes(Generic[T]):
    """Values by byte strings. Of two values under the same one the newer counts."""

    def __init__(self) -> None:
        self._by_length: dict[int, dict[bytes, T]] = {}

    def add(self, data: bytes, value: T) -> None:
        """Take in a sequence."""
        self._by_length.setdefault(len(data), {})[_digest(data).digest()] = value

    def find(self, data: bytes) -> list[T]:
        """The values of all known sequences that this one begins with (or is), the longest first."""
        found: list[T] = []
        digest, done = _digest(b""), 0
        view = memoryview(data)
        for length in sorted(length for length in self._by_length if length <= len(data)):
            digest.update(view[done:length])
            done = length
            value = self._by_length[length].get(digest.copy().digest())
            if value is not None:
                found.append(value)
        return found[::-1]


def _digest(data: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
