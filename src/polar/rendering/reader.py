"""Reads one sampled reply: ids to text, stop strings, then the model's parser.

A stop id at the end is not text. A stop string is searched for in all the text that was sampled, thinking
and markup included, as engines do; the text ends before it. Special tokens other than the stop id stay in
the text: some are markup, and nothing sampled may vanish.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar.contract.chat import Delta, FinishReason
from polar.rendering.base import Reply
from polar.rendering.parsers import Parser, fold, held
from polar.rendering.tokenizer import TextStream, Tokenizer


class StopStrings:
    """Cuts text at the first of some strings, and holds back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [string for string in strings if string]
        self._buffer = ""
        self.met: str | None = None

    def feed(self, text: str) -> str:
        """Text that surely stands before any stop string."""
        if self.met is not None:
            return ""
        self._buffer += text
        places = [(place, s) for s in self._strings if (place := self._buffer.find(s)) >= 0]
        if places:
            # The one that ends first: it is there first while sampling, however the text is cut.
            place, self.met = min(places, key=lambda found: (found[0] + len(found[1]), found[0]))
            out, self._buffer = self._buffer[:place], ""
            return out
        keep = max((held(self._buffer, s) for s in self._strings), default=0)
        cut = len(self._buffer) - keep
        out, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return out

    def finish(self) -> str:
        """What was held back and was no stop string."""
        out, self._buffer = self._buffer, ""
        return out


class TemplateReader:
    """A ``ReplyReader`` over a tokenizer and a parser."""

    def __init__(
        self, tokenizer: Tokenizer, parser: Parser, *, stop_ids: frozenset[int], stop: Sequence[str] = ()
    ) -> None:
        self._text = TextStream(tokenizer)
        self._parser = parser
        self._stop_ids = stop_ids
        self._stop = StopStrings(stop)
        self._pending: list[int] = []  # a stop id that is text only if more ids follow
        self._deltas: list[Delta] = []

    @property
    def stopped(self) -> bool:
        """A stop string was met."""
        return self._stop.met is not None

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """More sampled ids."""
        if not ids or self.stopped:
            return []
        ids = [*self._pending, *ids]
        cut = len(ids) - 1 if ids[-1] in self._stop_ids else len(ids)
        self._pending = ids[cut:]
        return self._parse(self._text.feed(ids[:cut]))

    def finish(self, finish_reason: FinishReason) -> Reply:
        """The end of the reply. Where a stop string was met the reason is ``stop`` whatever the engine says,
        since it is the caller who ended the sampling."""
        start = len(self._deltas)
        if not self.stopped:
            self._parse(self._text.finish())
        if not self.stopped:
            self._parse_held()
        self._deltas += self._parser.finish()
        message = fold(self._deltas)
        reason: FinishReason = "stop" if self.stopped or finish_reason == "tool_calls" else finish_reason
        if reason == "stop" and message.tool_calls:
            reason = "tool_calls"
        return Reply(message, reason, self._stop.met, tuple(self._deltas[start:]))

    def _parse(self, text: str) -> list[Delta]:
        deltas = self._parser.feed(self._stop.feed(text))
        self._deltas += deltas
        return deltas

    def _parse_held(self) -> None:
        self._deltas += self._parser.feed(self._stop.finish())
