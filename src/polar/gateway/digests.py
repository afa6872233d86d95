"""Why: whether a request repeats another is told by a digest of what it says, and a conversation is sent again with
every call. What was digested once is not digested again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from polar.contract.chat import Message
from polar.dialects.base import Call

if TYPE_CHECKING:
    from hashlib import _Hash

_pack = msgspec.msgpack.Encoder().encode
"""As it is: JSON would look at every character."""


class CallDigests:
    """The digests of one session's calls.

    The digest is of the meaning, not of the bytes: some harnesses change client metadata between two tries, or ask
    for a stream first and for the whole reply when that broke.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Message, ...], _Hash] = ((), hashlib.sha256())

    def of(self, dialect: str, call: Call) -> bytes:
        """16 bytes, the same for calls that ask the same, in whatever order they come."""
        messages = call.chat.messages
        before, digest = self._last  # taken and set as one: large bodies are read in threads
        if messages[: len(before)] != before:
            before, digest = (), hashlib.sha256()
        digest = digest.copy()
        digest.update(b"".join(map(_pack, messages[len(before) :])))
        self._last = messages, digest
        rest = msgspec.json.encode([dialect, call.previous_id, msgspec.structs.replace(call.chat, messages=())])
        whole = digest.copy()
        whole.update(rest)
        return whole.digest()[:16]
