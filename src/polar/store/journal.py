"""The journal of a gateway node: what it has captured and finished, until the server has it.

A ``Store`` that remembers what has been handed over. It may be asked again and again: what was marked stays marked,
and what was not marked (a node killed in between) is handed over once more. Nothing of it is forgotten before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.store.base import Store
from polar.store.ledger import Purged


class Journal(Store, Protocol):
    """A node's own store."""

    async def unshipped(self, limit: int) -> list[Completion]:
        """Captured calls that are still to be handed over, in order of session, attempt and ``seq``."""
        ...

    async def shipped(self, completion_ids: Sequence[str]) -> None:
        """These were handed over."""
        ...

    async def set_aside(self, refused: Mapping[str, str]) -> None:
        """These calls (ids) were refused for good, each for its reason: they stay here, and are not handed over."""
        ...

    async def refused(self, session_id: str, attempt: int) -> dict[str, str]:
        """The calls of an attempt that were set aside, and why; in order of ``seq``."""
        ...

    async def undelivered(self) -> list[SessionResult]:
        """Results that are still to be handed over, oldest first, without traces."""
        ...

    async def delivered(self, session_id: str, attempt: int) -> None:
        """This result was handed over, or came too late."""
        ...

    async def set_result_aside(self, session_id: str, attempt: int, reason: str) -> None:
        """This result was refused for good: it stays here, and is not handed over."""
        ...

    async def forget_handed_over(self, before: float, held: Collection[str], *, aside: bool) -> Purged:
        """Forget sessions that have not moved since ``before``, none of ``held`` (ids), with all that was captured
        and is handed over (``aside``: or set aside), whether they ended here or were cut off. The room in the file
        is used again."""
        ...
