"""A ledger over any database: every write is a rule on the writer's thread, every read a query on the reader's. What
is left to the databases is how to connect, to commit, and to say what went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from functools import partial

from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
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
)
from polar.contract.task import TaskRequest
from polar.store import endings, events, leases, nodes, outbound, queries, retention, rules
from polar.store.base import SessionRecord, StoreFailure
from polar.store.codec import dumps, encode_completion
from polar.store.connection import Apply, Read, T
from polar.store.ledger import PendingCallback, Purged, StoredResult, TaskProgress
from polar.store.writer import GroupWriter


class DatabaseStore(ABC):
    """``polar.store.ledger.Ledger``, which says what each of these does. Opened once, on one event loop.

    What a write keeps is the object as it is when the write is called; changes after that are not seen.

    Args:
        name: what a user calls this store, for errors; no secrets.
    """

    def __init__(self, name: str, *, read_only: bool) -> None:
        self.name = name
        self.read_only = read_only
        self._writer: GroupWriter | None = None
        self._loads: dict[str, tuple[NodeLoad, float]] = {}

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _read(self, read: Read[T]) -> T:
        """Ask the database, off the event loop."""

    async def _write(self, apply: Apply[T]) -> T:
        if self._writer is None:
            if self.read_only:
                raise UsageError(f"{self.name} was opened for reading only")
            raise StoreFailure(f"the store {self.name} is not open")
        return await self._writer.submit(apply)

    # ---- Store -------------------------------------------------------------------------------------------

    async def put_task(self, task: TaskRequest) -> None:
        await self._write(partial(rules.put_task, task=task, body=dumps(task)))

    async def put_session(self, session: SessionRecord) -> None:
        await self._write(partial(rules.put_session, session=copy(session), body=dumps(session)))

    async def put_completion(self, completion: Completion) -> None:
        row, shared = encode_completion(completion)
        await self._write(partial(rules.put_completion, completion=copy(completion), row=row, shared=shared))

    async def finish_session(self, session: SessionRecord, result: SessionResult, *, stored: bool = False) -> None:
        require_agreement(session, result)
        end = endings.ending(result)
        finish = partial(endings.finish_session, session=copy(session), body=dumps(session), end=end, stored=stored)
        await self._write(finish)

    async def task(self, task_id: str) -> TaskRequest | None:
        return await self._read(partial(queries.task, task_id=task_id))

    async def tasks(self) -> list[TaskRequest]:
        return await self._read(queries.tasks)

    async def session(self, session_id: str) -> SessionRecord | None:
        return await self._read(partial(queries.session, session_id=session_id))

    async def sessions(self, task_id: str | None = None) -> list[SessionRecord]:
        return await self._read(partial(queries.sessions, task_id=task_id))

    async def completions(self, session_id: str, attempt: int | None = None) -> list[Completion]:
        return await self._read(partial(queries.completions, session_id=session_id, attempt=attempt))

    async def result(self, session_id: str, attempt: int) -> SessionResult | None:
        return await self._read(partial(queries.result, session_id=session_id, attempt=attempt))

    async def results(self, task_id: str | None = None) -> list[SessionResult]:
        return await self._read(partial(queries.results, task_id=task_id))

    # ---- sessions given out, and what comes of them ------------------------------------------------------

    async def submit(self, task: TaskRequest, now: float) -> bool:
        return await self._write(partial(leases.submit, task=task, body=dumps(task), now=now))

    async def claim(
        self, node_id: str, room: int, seconds: float, now: float, *, claim_id: str | None = None
    ) -> list[Lease]:
        claim = partial(leases.claim, node_id=node_id, room=room, seconds=seconds, now=now, claim_id=claim_id)
        return await self._write(claim)

    async def renew(self, node_id: str, held: Sequence[Held], seconds: float, now: float) -> HeartbeatReply:
        return await self._write(partial(leases.renew, node_id=node_id, held=list(held), seconds=seconds, now=now))

    async def release(
        self, node_id: str, session_id: str, attempt: int, now: float, error: str | None = None
    ) -> None:
        release = partial(
            leases.release, node_id=node_id, session_id=session_id, attempt=attempt, now=now, error=error
        )
        await self._write(release)

    async def expire(self, now: float) -> list[SessionRecord]:
        return await self._write(partial(leases.expire, now=now))

    async def deliver(self, node_id: str, delivery: Delivery, now: float) -> None:
        of = (delivery.session_id, delivery.attempt)
        result = delivery.result
        if any((c.session_id, c.attempt) != of for c in delivery.completions) or (
            result is not None and (result.session_id, result.attempt) != of
        ):
            raise ValueError(f"a delivery for session {of[0]} attempt {of[1]} has parts of something else")
        deliver = partial(
            endings.deliver,
            node_id=node_id,
            session_id=delivery.session_id,
            attempt=delivery.attempt,
            completions=[(copy(c), *encode_completion(c)) for c in delivery.completions],
            end=None if result is None else endings.ending(result),
            now=now,
        )
        await self._write(deliver)

    async def cancel(self, task_id: str, now: float, reason: str = "cancelled") -> list[SessionRecord] | None:
        return await self._write(partial(leases.cancel, task_id=task_id, now=now, reason=reason))

    async def progress(self, task_id: str | None = None) -> list[TaskProgress]:
        return await self._read(partial(queries.progress, task_id=task_id))

    async def session_states(self) -> dict[str, int]:
        return await self._read(queries.session_states)

    async def recent_sessions(
        self, *, task_id: str | None = None, state: str | None = None, limit: int = 100
    ) -> list[SessionRecord]:
        return await self._read(partial(queries.recent_sessions, task_id=task_id, state=state, limit=limit))

    # ---- handed on ---------------------------------------------------------------------------------------

    async def results_after(self, cursor: int, limit: int, task_id: str | None = None) -> list[StoredResult]:
        return await self._read(partial(queries.results_after, cursor=cursor, limit=limit, task_id=task_id))

    async def newest_result(self) -> int:
        return await self._read(queries.newest_result)

    async def acknowledged(self, consumer: str) -> int:
        return await self._read(partial(queries.acknowledged, consumer=consumer))

    async def acknowledge(self, consumer: str, cursor: int) -> None:
        await self._write(partial(outbound.acknowledge, consumer=consumer, cursor=cursor))

    async def callbacks_due(
        self, now: float, limit: int = 100, *, but_not: Sequence[str] = ()
    ) -> list[PendingCallback]:
        return await self._read(partial(queries.callbacks_due, now=now, limit=limit, but_not=tuple(but_not)))

    async def put_off_callback(self, due: PendingCallback, until: float) -> bool:
        put_off = partial(outbound.put_off_callback, task_id=due.task_id, due_at=due.due_at, until=until)
        return await self._write(put_off)

    async def callback_tried(self, task_id: str, *, arrived: bool, retry_at: float | None, error: str | None) -> None:
        tried = partial(outbound.callback_tried, task_id=task_id, arrived=arrived, retry_at=retry_at, error=error)
        await self._write(tried)

    async def callbacks_failed(self) -> list[tuple[str, str]]:
        return await self._read(queries.callbacks_failed)

    async def events_after(self, event_id: int, limit: int = 1000) -> list[Event]:
        return await self._read(partial(queries.events_after, event_id=event_id, limit=limit))

    async def newest_event(self) -> int:
        return await self._read(queries.newest_event)

    # ---- nodes -------------------------------------------------------------------------------------------

    async def put_node(self, spec: NodeSpec, now: float) -> None:
        await self._write(partial(leases.register, spec=spec, now=now))

    async def node_load(self, node_id: str, load: NodeLoad, now: float) -> bool:
        if node_id not in self._loads and not await self._read(partial(queries.knows_node, node_id=node_id)):
            return False
        self._loads[node_id] = (load, now)
        return True

    async def drain(self, node_id: str, now: float) -> NodeInfo | None:
        await self._write(partial(nodes.drain, node_id=node_id, now=now))
        return next((node for node in await self.nodes(now) if node.node_id == node_id), None)

    async def nodes(self, now: float) -> list[NodeInfo]:
        return await self._read(partial(queries.nodes, now=now, loads_told=dict(self._loads)))

    # ---- kept and forgotten ------------------------------------------------------------------------------

    async def audit(self, entry: AuditEntry) -> None:
        await self._write(partial(events.audit, entry=entry))

    async def audit_log(self, limit: int = 1000) -> list[AuditEntry]:
        return await self._read(partial(queries.audit_log, limit=limit))

    async def forget_session(self, session_id: str) -> int:
        return await self._write(partial(retention.forget_session, session_id=session_id))

    async def forget_there_later(self, session_id: str, node_id: str) -> int:
        forget = partial(retention.forget_there_later, session_id=session_id, node_id=node_id)
        return await self._write(forget)

    async def to_forget(self) -> list[tuple[str, str]]:
        return await self._read(queries.to_forget)

    async def forgotten_there(self, session_id: str, node_id: str) -> None:
        await self._write(partial(retention.forgotten_there, session_id=session_id, node_id=node_id))

    async def purge(self, before: float) -> Purged:
        purged = []
        for task_id in await self._read(partial(retention.tasks_over, before=before)):
            purged.append(await self._write(partial(retention.forget_task, task_id=task_id, before=before)))
        for session_id in await self._read(partial(retention.bare_over, before=before)):
            purged.append(await self._write(partial(retention.forget_bare, session_id=session_id, before=before)))
        await self._write(partial(retention.tidy, before=before))
        known = {node.node_id for node in await self.nodes(before)}
        for node_id in self._loads.keys() - known:
            del self._loads[node_id]
        return Purged(*map(sum, zip(retention.NOTHING, *purged, strict=True)))


def require_agreement(session: SessionRecord, result: SessionResult) -> None:
    """See that a record is of an end, and its result of the same.

    Raises:
        ValueError: it is not.
    """
    said = (session.session_id, session.task_id, session.attempt, session.state)
    if session.state not in TERMINAL_STATES:
        raise ValueError(f"session {session.session_id} can't be finished as {session.state}")
    if said != (result.session_id, result.task_id, result.attempt, result.status):
        raise ValueError(f"session {session.session_id}: the record and its result do not agree")
