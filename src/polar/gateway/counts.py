"""What went through a gateway, in numbers: a few additions a call, read now and then by whoever watches it."""

from __future__ import annotations

from collections import Counter

from polar.contract.completion import Completion


class CallCounts:
    """Sums since the start. ``calls``: by dialect and outcome."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.joined = 0
        """Requests that were a retry of a call, and got its answer."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.seconds = 0.0
        """Summed over calls, from their start to their commit."""

    def ended(self, completion: Completion) -> None:
        """A call was committed."""
        self.calls[completion.dialect, completion.outcome] += 1
        self.prompt_tokens += completion.usage.prompt_tokens
        self.cached_tokens += completion.usage.cached_tokens
        self.completion_tokens += completion.usage.completion_tokens
        self.seconds += completion.finished_at - completion.created_at
