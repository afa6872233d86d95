"""Why: how many wait at this moment says little about how long each has waited. A few additions a wait; whoever
watches reads them now and then.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

BOUNDS = (0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds."""


class Waits:
    """How long was waited for one thing, since the start: as a histogram."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Summed over all waits."""
        self._counts = [0] * (len(BOUNDS) + 1)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the wait inside when it has ended well; one that was given up was for nothing."""
        begin = time.monotonic()
        yield
        took = time.monotonic() - begin
        self.seconds += took
        self._counts[bisect_left(BOUNDS, took)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds in seconds (the last is ``+Inf``), and how many waits were that long or shorter."""
        names = [*(str(bound) for bound in BOUNDS), "+Inf"]
        return [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
