"""Why: an engine is sent the whole conversation with every call, and it grows at its end. What was written for the
call before is not written again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import orjson

from polar.contract.chat import Message
from polar.engines.http import encode
from polar.engines.openai_request import wire_message


class _Written(NamedTuple):
    messages: tuple[Message, ...]
    text: bytes


class Histories:
    """The last conversation of each session, as JSON. The oldest go when there are ``limit`` bytes."""

    def __init__(self, limit: int = 64 * 1024 * 1024) -> None:
        self._limit = limit
        self._written: OrderedDict[str, _Written] = OrderedDict()
        self._size = 0

    def of(self, session: str, messages: tuple[Message, ...]) -> orjson.Fragment:
        """The list of these messages.

        Raises:
            EngineError: ``bad_request``: it can't be written.
        """
        before = self._written.pop(session, _Written((), b"[]"))
        self._size -= len(before.text)
        text, known = before.text, len(before.messages)
        if messages[:known] != before.messages:
            text, known = b"[]", 0
        if known < len(messages):
            new = encode([wire_message(message) for message in messages[known:]])
            text = b"%s,%s" % (text[:-1], new[1:]) if known else new
        self._written[session] = _Written(messages, text)
        self._size += len(text)
        while self._size > self._limit:
            self._size -= len(self._written.popitem(last=False)[1].text)
        return orjson.Fragment(text)
