"""Why: a trainer must know, token by token, which weights a reply was sampled from. Engines name them chunk by chunk,
at the end, or not at all; then what the operator has set counts. Both are kept until the reply is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from polar.contract.completion import WeightSpan


class WeightRecord:
    """The weight versions of one reply.

    Args:
        told: the version that the operator had set when the call began.
    """

    def __init__(self, told: str | None) -> None:
        self.uncertain = 0
        """Ids that came in one piece during which the operator set another version: which of them were sampled
        before, nobody can tell. They count as sampled after."""
        self._reported: list[WeightSpan] = []
        self._told: list[WeightSpan] = []
        self._last_told = told

    def piece(self, start: int, end: int, *, reported: str | None, told: str | None) -> None:
        """Response tokens ``[start, end)`` have come: under which version by the engine, and by the operator."""
        if end == start:
            return
        if reported is not None:
            _join(self._reported, WeightSpan(reported, start, end))
        if told is not None:
            _join(self._told, WeightSpan(told, start, end))
            if told != self._last_told and end - start > 1:
                self.uncertain += end - start
        self._last_told = told

    def spans(self, spans: Sequence[WeightSpan]) -> None:
        """The engine's word on tokens that have come already."""
        for span in spans:
            if span.start < span.end:
                _join(self._reported, span)

    @property
    def told(self) -> tuple[WeightSpan, ...]:
        """By the operator alone."""
        return tuple(self._told)

    @property
    def from_engine(self) -> bool:
        """The engine has named versions."""
        return bool(self._reported)

    def whole(self) -> tuple[WeightSpan, ...]:
        """The spans that count: the engine's word, and the operator's on tokens of which the engine said nothing."""
        if not (self._told and self._reported):
            return tuple(self._told or self._reported)
        names: list[str | None] = [None] * max(self._told[-1].end, self._reported[-1].end)
        for span in (*self._told, *self._reported):
            names[span.start : span.end] = [span.version] * (span.end - span.start)
        spans: list[WeightSpan] = []
        for name, places in itertools.groupby(range(len(names)), key=names.__getitem__):
            group = list(places)
            if name is not None:
                spans.append(WeightSpan(name, group[0], group[-1] + 1))
        return tuple(spans)

    def disagreement(self) -> tuple[list[str], list[str]] | None:
        """The versions that were set and those that the engine reports, where they are not the same in the same
        order. At which token one follows the other is no matter: the engine simply knows that better."""
        told, reported = ([span.version for span in spans] for spans in (self._told, self._reported))
        return (told, reported) if told and reported and told != reported else None


def _join(spans: list[WeightSpan], new: WeightSpan) -> None:
    """Put a span at the end. What was said before of its tokens, or of later ones, gives way."""
    while spans and spans[-1].start >= new.start:
        spans.pop()
    if spans and spans[-1].end > new.start:
        last = spans.pop()
        spans.append(WeightSpan(last.version, last.start, new.start))
    if spans and spans[-1].version == new.version and spans[-1].end == new.start:
        new = WeightSpan(new.version, spans.pop().start, new.end)
    spans.append(new)
