"""The journal of a gateway node: what it has captured and finished, until the server has it.

A ``Store`` that remembers what has been handed over. It may be asked again and again: what was marked stays marked,
and what was not marked (a node killed in between) is handed over once more. Nothing of it is purged before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.store.base import Store


class Journal(Store, Protocol):
    """A node's own store."""

    async def unshipped(self, limit: int) -> list[Completion]:
        """Captured calls that were not handed over yet, in order of session, attempt and ``seq``."""
        ...

    async def shipped(self, completion_ids: Sequence[str]) -> None:
        """These were handed over, or refused for good."""
        ...

    async def undelivered(self) -> list[SessionResult]:
        """Results that were not handed over yet, oldest first, without traces."""
        ...

    async def delivered(self, session_id: str, attempt: int) -> None:
        """This result was handed over, or refused for good."""
        ...
