"""Why: a harness sends its whole conversation with every call, and nearly always as the bytes of the call before and
more. Those bytes are compared instead of read again.

JSON is read from left to right. Where two bodies have the same bytes up to the end of some message of the list, what
they mean up to there is the same, and what comes after is read the same way. So the messages in between may be cut
out, with a mark in their place, and the rest is a body that can be read by itself.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from polar.contract.chat import Message

_MARK = msgspec.Raw(b'"%s"' % secrets.token_hex(16).encode())
"""Stands for messages that were read already. No message is a string."""


class _Messages(msgspec.Struct):
    messages: list[msgspec.Raw] = []


_messages = msgspec.json.Decoder(_Messages)
_list = msgspec.json.Decoder(list[msgspec.Raw])
_COMMAS = (b",", b", ")
"""As JavaScript and as Python write them: then the list need not be read to see that it is the same."""
SMALLEST = 16 * 1024
"""Bytes of a body from which it is kept: a smaller one is read as fast as it is compared."""


class _Sent(NamedTuple):
    """The beginning of a body up to the end of its last message, how much of that comes before the messages, and what
    they are."""

    beginning: bytes
    head: int
    messages: tuple[Message, ...]


class Shortened(NamedTuple):
    """A body to read, and the messages that were cut out of its list, from the start. ``before``: how many bytes of
    the body as it came are not in this one."""

    body: bytes
    known: tuple[Message, ...] = ()
    before: int = 0

    def new(self, raws: Sequence[msgspec.Raw]) -> Sequence[msgspec.Raw] | None:
        """The messages that are to be read; ``None`` where the cut was in another list than this."""
        if not self.known:
            return raws
        return raws[1:] if raws and raws[0] == _MARK else None


class Resent:
    """The last body of each client, by its key. The oldest go when there are ``limit`` bytes.

    Args:
        smallest: bytes of a body from which it is kept.
    """

    def __init__(self, limit: int = 64 * 1024 * 1024, *, smallest: int = SMALLEST) -> None:
        self._limit, self._smallest = limit, smallest
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()  # large bodies are parsed in threads

    def shorten(self, key: str, body: bytes) -> Shortened:
        """The body without the messages that this client sent before; all of it, if it does not begin with them."""
        sent = self._sent.get(key) if key else None
        if sent is None or not body.startswith(sent.beginning):
            return Shortened(body)
        short = sent.beginning[: sent.head] + bytes(_MARK) + body[len(sent.beginning) :]
        return Shortened(short, sent.messages, len(body) - len(short))

    def keep(
        self, key: str, body: bytes, short: Shortened, raws: Sequence[msgspec.Raw], messages: tuple[Message, ...]
    ) -> None:
        """A body was read: its messages, and their JSON as they stand in what was read of it."""
        if not key or len(body) < self._smallest:
            return
        read, last = short.body, bytes(raws[-1])
        head, end = read.find(bytes(raws[0])), read.rfind(last) + len(last)
        if not _lists(read, head, end, raws):
            return
        sent = _Sent(body[: end + short.before], head, messages)
        with self._lock:
            old = self._sent.pop(key, None)
            self._size += len(sent.beginning) - (len(old.beginning) if old else 0)
            self._sent[key] = sent
            while self._size > self._limit:
                _, oldest = self._sent.popitem(last=False)
                self._size -= len(oldest.beginning)


def _lists(body: bytes, head: int, end: int, raws: Sequence[msgspec.Raw]) -> bool:
    """Whether it is so, as both places were found by their text: behind the head comes a list that is the body's
    messages, and up to the end there are these and nothing else."""
    try:
        place = _messages.decode(body[:head] + bytes(_MARK) + b"]}").messages
        text = body[head:end]
        same = any(text == comma.join(raws) for comma in _COMMAS) or _list.decode(b"[" + text + b"]") == raws
        return place == [_MARK] and same
    except msgspec.DecodeError:
        return False
