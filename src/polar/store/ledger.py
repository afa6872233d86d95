"""The ledger: the store of a rollout server, which decides who runs what and what has come of it.

It is a ``Store`` with leases on top. A session's attempt is its fencing number: a lease is for one attempt, a lapsed
lease makes the session a new attempt, and every write under an old one is refused. ``now`` is epoch seconds and
comes from the caller, so that one clock decides. Events are written in the transaction of what they tell of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from polar.contract.result import SessionResult
from polar.contract.rollout import (
    AuditEntry,
    Delivery,
    Event,
    HeartbeatReply,
    Held,
    Lease,
    NodeInfo,
    NodeLoad,
    NodeSpec,
    TaskState,
)
from polar.contract.task import TaskRequest
from polar.store.base import SessionRecord, Store

MAX_ATTEMPTS = 3
"""How often a session is begun before it ends as ERROR ``attempts exhausted``."""

MAX_HANDED_BACK = 10
"""How often nodes may hand a session back because of an error of their own (a full disk, a store that fails) before
it ends as ERROR: often enough for a bad hour, and no circling for ever."""

EVENTS_KEPT = 100_000
"""How many of the newest events are kept."""


class StoredResult(NamedTuple):
    """A result with its place in the order in which results were stored."""

    cursor: int
    result: SessionResult


class PendingCallback(NamedTuple):
    """A task whose callback is due, how often it was tried, and since when it is due."""

    task_id: str
    url: str
    tries: int
    due_at: float


class TaskProgress(NamedTuple):
    """How far a task is. ``usable``: sessions that ended without an error and have trained tokens."""

    task_id: str
    status: TaskState
    sessions: int
    ended: int
    usable: int


class Purged(NamedTuple):
    """What retention removed."""

    tasks: int
    sessions: int
    completions: int


class Ledger(Store, Protocol):
    """Tasks in, results out, nothing lost. All that ``Store`` says of durability and repetition holds here."""

    async def submit(self, task: TaskRequest, now: float) -> bool:
        """Keep a task and register its sessions, in one transaction; whether it is new.

        Raises:
            StoreConflict: the id exists with another body, or one of its sessions belongs to another task.
        """
        ...

    async def claim(
        self, node_id: str, room: int, seconds: float, now: float, *, claim_id: str | None = None
    ) -> list[Lease]:
        """Lease up to ``room`` registered sessions to a node: higher priority first, then oldest first. None to a
        node that drains. The same ``claim_id`` again has the leases that it got before, as far as they still hold,
        so an answer that was lost on its way costs no attempt."""
        ...

    async def renew(self, node_id: str, held: Sequence[Held], seconds: float, now: float) -> HeartbeatReply:
        """Renew the leases that this node holds and keep the states it tells; what it no longer holds, and what was
        cancelled, is in the reply."""
        ...

    async def release(
        self, node_id: str, session_id: str, attempt: int, now: float, error: str | None = None
    ) -> None:
        """Hand a lease back: the session is registered again, as an attempt that does not count against
        ``MAX_ATTEMPTS``. If it was cancelled it ends instead, and so it does (as ERROR, with the last error) when it
        is handed back with an ``error`` for the ``MAX_HANDED_BACK``-th time. What the node does not hold it can't
        hand back: nothing is done."""
        ...

    async def expire(self, now: float) -> list[SessionRecord]:
        """Take back every lease that has lapsed. Its session is registered as a new attempt, or, after
        ``MAX_ATTEMPTS``, ends as ERROR with a result. The sessions as they are now. Nodes that were not heard of
        within their time are gone from here on, and events beyond ``EVENTS_KEPT`` are dropped."""
        ...

    async def deliver(self, node_id: str, delivery: Delivery, now: float) -> None:
        """What a node's journal hands over, in one transaction: captured calls, and the result that ends the attempt.
        Calls of an attempt that the node held and that is over are kept as history; a result of one is refused.

        Raises:
            StoreConflict: the node does not hold this attempt, or it ended with another result.
            ValueError: the delivery has calls or a result of something else.
        """
        ...

    async def cancel(self, task_id: str, now: float, reason: str = "cancelled") -> list[SessionRecord] | None:
        """End a task: sessions that nobody holds end as ERROR with this reason now, the others are marked, and their
        nodes told at the next heartbeat. The sessions as they are now; ``None``: no such task."""
        ...

    async def progress(self, task_id: str | None = None) -> list[TaskProgress]:
        """How far the tasks are, oldest first: all of them, or the one that is named (none if it is not known)."""
        ...

    async def session_states(self) -> dict[str, int]:
        """How many sessions are in each state that there are any in."""
        ...

    async def recent_sessions(
        self, *, task_id: str | None = None, state: str | None = None, limit: int = 100
    ) -> list[SessionRecord]:
        """The sessions that moved last, the very last first: all of them, or those of a task or in a state."""
        ...

    async def results_after(self, cursor: int, limit: int, task_id: str | None = None) -> list[StoredResult]:
        """Results of newest attempts stored after ``cursor`` (0: from the first), in order, without traces. A result
        that is stored later always has a higher cursor."""
        ...

    async def newest_result(self) -> int:
        """The cursor of the result that was stored last (0: there is none)."""
        ...

    async def acknowledged(self, consumer: str) -> int:
        """The cursor up to which a consumer has acknowledged results (0: none)."""
        ...

    async def acknowledge(self, consumer: str, cursor: int) -> None:
        """A consumer has dealt with every result up to ``cursor``. It never goes back."""
        ...

    async def callbacks_due(
        self, now: float, limit: int = 100, *, but_not: Sequence[str] = ()
    ) -> list[PendingCallback]:
        """Tasks with a callback address whose sessions have all ended and whose callback has not arrived yet, those
        left out that go to a host of ``but_not`` (``host:port`` as in the URL, in lower case)."""
        ...

    async def put_off_callback(self, due: PendingCallback, until: float) -> bool:
        """Take a callback that is due, so that nobody else sends it: it is due again only from ``until``, if nothing
        is heard of a try before. Whether it was as ``due`` says: of several who ask, one gets it. Whoever has it
        may put it off further (``due_at`` is then the ``until`` from before), or give it back with a time past."""
        ...

    async def callback_tried(self, task_id: str, *, arrived: bool, retry_at: float | None, error: str | None) -> None:
        """How a try went. Neither arrived nor to be tried again: it is given up, and stays listed with its error."""
        ...

    async def callbacks_failed(self) -> list[tuple[str, str]]:
        """Callbacks whose last try failed, as task ids with the error, those given up included."""
        ...

    async def events_after(self, event_id: int, limit: int = 1000) -> list[Event]:
        """Events after ``event_id`` (0: from the first that is kept), in order."""
        ...

    async def newest_event(self) -> int:
        """The id of the newest event (0: there is none)."""
        ...

    async def put_node(self, spec: NodeSpec, now: float) -> None:
        """A node has registered (again). Under another ``instance`` than before it no longer drains, and the leases
        that it had lapse now."""
        ...

    async def node_load(self, node_id: str, load: NodeLoad, now: float) -> bool:
        """A node's sign of life; whether the node is known. Kept in memory: it is no promise to anybody."""
        ...

    async def drain(self, node_id: str, now: float) -> NodeInfo | None:
        """The node shall take no more; ``None``: it is not known."""
        ...

    async def nodes(self, now: float) -> list[NodeInfo]:
        """Every node, by id, with the number of leases it holds."""
        ...

    async def audit(self, entry: AuditEntry) -> None:
        """Append to the audit log. Nothing in it is ever changed."""
        ...

    async def audit_log(self, limit: int = 1000) -> list[AuditEntry]:
        """The newest entries, oldest first."""
        ...

    async def forget_there_later(self, session_id: str, node_id: str) -> int:
        """``forget_session``, and in the same transaction a note that this node, which is away, has it still."""
        ...

    async def to_forget(self) -> list[tuple[str, str]]:
        """What nodes must still be told to forget: sessions' ids, each with its node's; by node."""
        ...

    async def forgotten_there(self, session_id: str, node_id: str) -> None:
        """The node has forgotten it."""
        ...

    async def purge(self, before: float) -> Purged:
        """Forget tasks all of whose sessions ended before ``before``, with their sessions, calls and results; bare
        capture sessions likewise. What other sessions share is kept, and so is what a callback or a journal still
        has to hand over. Nodes that are gone since then are forgotten, too, and events of before."""
        ...
