"""Why: a program that calls ``/v1/completions`` writes its own prompts, control tokens and all. No template has a say
there, and what it sends next is to go on behind the very ids that were sampled, where that can be proven.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar.contract.arrays import NO_IDS, Ids
from polar.rendering.parsers import PlainParser
from polar.rendering.reader import TemplateReader
from polar.rendering.tokenizer import Tokenizer


class PlainText:
    """Plain text to ids and back, for one model."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids

    def encode(self, text: str, *, special: bool) -> Ids:
        """Ids of text; control tokens in it become themselves.

        Args:
            special: with what the tokenizer itself adds (a BOS).
        """
        return np.asarray(self._tokenizer.encode_as_sent(text, special=special), dtype=np.int32)

    def tail(self, before: Ids, text: str) -> Ids | None:
        """Ids of ``text`` after the ids ``before``, or ``None`` where they may depend on what those are.

        A tokenizer cuts text at control tokens, so they depend on nothing where one stands on either side.
        """
        if not text:
            return NO_IDS
        starts = self._tokenizer.control_at(text)
        if starts is not None and starts.start() == 0:
            return self.encode(text, special=False)
        anchor = self._tokenizer.token_text(int(before[-1])) if len(before) else None
        if anchor is None or anchor not in self._tokenizer.control:
            return None
        ids = self.encode(anchor + text, special=False)
        return ids[1:] if ids[0] == before[-1] else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return self._tokenizer.decode(ids)

    def reader(self, stop: Sequence[str]) -> TemplateReader:
        """A reader for a reply in which nothing is markup."""
        return TemplateReader(self._tokenizer, PlainParser(), stop_ids=self._stop_ids, stop=stop)
