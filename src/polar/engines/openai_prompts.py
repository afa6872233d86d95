"""Why: an engine sends the ids of the whole prompt with every reply: at 40,000 tokens a quarter of a megabyte of
digits, nearly all of which it has sent before. So its own text is kept, and compared byte by byte.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import orjson

from polar.contract.arrays import Ids

SMALLEST = 16 * 1024
"""Bytes of a list from which it is kept: a smaller one is written as fast as it is found."""


class _Told(NamedTuple):
    """Ids (int32), and the list of them as the engine wrote it, without its last bracket."""

    ids: Ids
    text: bytes

    @property
    def size(self) -> int:
        return self.ids.nbytes + len(self.text)


class PromptTexts:
    """The last prompt of each session. The oldest go when there are ``limit`` bytes."""

    def __init__(self, limit: int = 64 * 1024 * 1024, *, smallest: int = SMALLEST) -> None:
        self._limit, self._smallest = limit, smallest
        self._told: OrderedDict[str, _Told] = OrderedDict()
        self._size = 0

    def beginning(self, session: str, expected: Ids) -> tuple[bytes, bytes]:
        """How the JSON list of a prompt begins that begins with these ids and goes on: in two pieces, so that the
        first can be one that is kept."""
        told = self._told.get(session)
        if told is None or len(told.ids) > len(expected) or not np.array_equal(told.ids, expected[: len(told.ids)]):
            return _text(expected)[:-1], b","
        rest = expected[len(told.ids) :]
        return told.text, b",%s," % _text(rest)[1:-1] if len(rest) else b","

    def keep(self, session: str, ids: Ids, text: bytes) -> None:
        """An engine has written these ids so."""
        told = self._told.pop(session, None)
        self._size -= told.size if told else 0
        if len(text) < self._smallest or not len(ids):
            return
        ids.setflags(write=False)
        self._told[session] = told = _Told(ids, text)
        self._size += told.size
        while self._size > self._limit:
            self._size -= self._told.popitem(last=False)[1].size


def _text(ids: Ids) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
