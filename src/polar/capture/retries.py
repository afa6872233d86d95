"""Which call a repeated request belongs to.

A client that times out sends the same bytes again. If both were sampled, one harness turn would be two
generations, and the reply that the harness never saw would be trained. A request is the same call when the
client says so (an idempotency key, an SDK's retry header) or when the client of an identical call has gone
away without its answer (some CLIs re-send unmarked). Two identical requests whose clients are both there are
two calls: best-of-n harnesses send them on purpose.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Repeatable(Protocol):
    """What the ledger must know of a call."""

    @property
    def waiting(self) -> int:
        """Clients connected to it now."""
        ...

    @property
    def delivered(self) -> bool:
        """A client has received the whole answer."""
        ...

    @property
    def failed(self) -> bool:
        """It has ended without an answer, or is about to: a repetition must start afresh."""
        ...


C = TypeVar("C", bound=Repeatable)


class KeyReused(Exception):
    """An idempotency key came again with another body."""


class RetryLedger(Generic[C]):
    """The calls of one session by digest and by idempotency key.

    The calls of ``keep`` digests are kept at most: a retry comes within minutes.
    """

    def __init__(self, keep: int = 256) -> None:
        self._keep = keep
        self._by_digest: dict[bytes, list[C]] = {}
        self._by_key: dict[str, tuple[bytes, C]] = {}

    def find(self, digest: bytes, *, key: str | None, marked: bool) -> C | None:
        """The call that this request repeats, or ``None`` if it is a new one.

        Args:
            digest: of the dialect and what is asked.
            key: the client's idempotency key, if it sent one. A call that has another one is another call.
            marked: the client says that this is a retry.

        Raises:
            KeyReused: the key belongs to another body.
        """
        if key is not None and key in self._by_key:
            known, call = self._by_key[key]
            if known != digest:
                raise KeyReused(key)
            return None if call.failed else call
        same = self._by_digest.get(digest, [])
        if key is None:
            return self._repeated(same, marked)
        others = [call for _, call in self._by_key.values()]
        found = self._repeated([call for call in same if call not in others], marked)
        if found is not None:
            self._name(key, digest, found)
        return found

    def add(self, digest: bytes, call: C, *, key: str | None) -> None:
        """A new call begins; where a call of the same digest has failed, it is that one's repetition."""
        same = self._by_digest.pop(digest, [])
        repeated = next((known for known in same if known.failed), None)
        answered = [known for known in same if known.delivered][-1:]
        pending = [known for known in same if not known.delivered and known is not repeated]
        self._by_digest[digest] = [*answered, *pending, call]
        if key is not None:
            self._name(key, digest, call)
        while len(self._by_digest) > self._keep:
            self._by_digest.pop(next(iter(self._by_digest)))

    @staticmethod
    def _repeated(same: list[C], marked: bool) -> C | None:
        """Which of the calls of one digest comes again. One that failed did so for a client of its own, and a marked
        retry is sooner that client's than one that joins another's call."""
        failed = any(call.failed for call in same)
        pending = [call for call in same if not call.delivered and not call.failed]
        left = next((call for call in pending if call.waiting == 0), None)
        if left is not None or failed or not marked:
            return left
        known = pending or same
        return known[-1] if known else None

    def _name(self, key: str, digest: bytes, call: C) -> None:
        self._by_key[key] = (digest, call)
        while len(self._by_key) > self._keep:
            self._by_key.pop(next(iter(self._by_key)))
