"""A gateway node at work: it claims sessions when it has room, keeps their leases alive, takes them through their
stages, and hands over what it captured and what came of it.

A server that can't be reached stops nothing: sessions go on, their calls and results wait in the node's journal.
A lease that was lost while nobody could say so does no harm either, since what is written under it is refused.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from polar.contract.errors import PolarError, UsageError
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.rollout import (
    HEARTBEAT_SECONDS,
    Claim,
    Delivery,
    Heartbeat,
    HeartbeatReply,
    Held,
    Lease,
    NodeSpec,
    Release,
)
from polar.contract.task import TaskRequest
from polar.gateway import disk
from polar.gateway.coordinator import Coordinator, Unreachable
from polar.gateway.lifecycle import Stages
from polar.gateway.node import Node
from polar.gateway.session_log import about_session, log_end
from polar.gateway.session_run import Parts, SessionRun, ended_before_it_began
from polar.gateway.shipping import Shipping
from polar.logs import about
from polar.store.base import SessionRecord, StoreConflict, StoreFailure
from polar.store.journal import Journal

log = logging.getLogger("polar.node")

CLAIM_WAIT = 20.0
"""How long one question for sessions stays open at the server."""
SHIP_EVERY = 1.0
"""Seconds after which captured calls are handed over, when no session has ended before."""
_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between tries while the server can't be reached."""
_PARTS_KEPT = 256
ILL_SECONDS = 5.0
"""How long no session is claimed after one could not be kept."""

MakeParts = Callable[[TaskRequest], Awaitable[Parts]]


class Worker:
    """Runs sessions for a rollout server.

    Args:
        node: engine, proxy and store. The store is the ledger itself, or this node's own journal.
        journal: the node's store, where that is not the ledger: what is in it is handed over.
        make_parts: looks up what a task needs, on this machine.
        on_change: told of every new state of a session, after it is on disk.
    """

    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        spec: NodeSpec,
        stages: Stages,
        make_parts: MakeParts,
        *,
        journal: Journal | None = None,
        on_change: Callable[[SessionRecord], None] = lambda _: None,
    ) -> None:
        self.spec = spec
        self.stages = stages
        self.draining = False
        self._node = node
        self._coordinator = coordinator
        self._make_parts = make_parts
        self._journal = journal
        self._shipping = None if journal is None else Shipping(journal, coordinator, self._settled)
        self._on_change = on_change
        self._ill_until = 0.0
        self._coming: dict[str, Lease] = {}
        """Given to this node, and not begun yet."""
        self._runs: dict[str, tuple[SessionRun, asyncio.Task[None]]] = {}
        self._owed: dict[str, int] = {}
        """Attempts with a result that has not been handed over yet: their leases must not lapse."""
        self._leaving: set[tuple[str, int]] = set()
        """Attempts whose end, or return, is on its way to the server."""
        self._cutting: set[asyncio.Task[None]] = set()
        self._claiming: asyncio.Task[None] | None = None
        self._parts: dict[str, Parts] = {}
        self._room = asyncio.Event()
        self._to_ship = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def held(self) -> list[Held]:
        """The session attempts that this node runs, is about to run, or has a result of that it still owes; and where
        they stand."""
        records = [run.record for run, _ in self._runs.values() if run.record.state not in TERMINAL_STATES]
        running = [Held(session_id=r.session_id, attempt=r.attempt, state=r.state) for r in records]
        coming = [each for name, each in self._coming.items() if name not in self._runs]
        running += [Held(session_id=c.session_id, attempt=c.attempt, state="REGISTERED") for c in coming]
        names = {record.session_id for record in records}
        owed = [each for each in self._owed.items() if each[0] not in names]
        return running + [Held(session_id=name, attempt=attempt, state="POST_RUN") for name, attempt in owed]

    async def work(self) -> None:
        """Claim and run sessions, until cancelled; what still ran then is cut off, and its leases lapse.

        Raises:
            UsageError: the server does not take this node.
        """
        shipping = self._shipping
        if shipping is not None:
            # First, because a new process holds none of the leases under which these results were made.
            await self._ship_now(shipping)
        await self._persist(lambda: self._coordinator.register(self.spec))
        loops: list[Coroutine[Any, Any, None]] = [self._claim_all(), self._beat()]
        if shipping is not None:
            loops.append(self._ship_all(shipping))
        try:
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
        except* PolarError as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._cut_off()

    async def drain(self, seconds: float) -> None:
        """Take no more sessions, and wait until those that run have ended; those that have not after ``seconds`` are
        handed back, to be run again elsewhere. The server hears of it at once."""
        self._stop_claiming()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._try(self._say_draining()))
            try:
                async with asyncio.timeout(seconds):
                    await self._idle.wait()
            except TimeoutError:
                left = self.held
                self._coming.clear()
                await self._cut_off()
                for each in left:
                    if self._owed.get(each.session_id) != each.attempt:  # else it has ended
                        await self._try(self._release(each.session_id, each.attempt))

    async def hand_over(self) -> None:
        """What was captured and finished here, as far as the server takes it now."""
        if self._shipping is not None:
            await self._try(self._shipping.ship())

    # ---- sessions ----------------------------------------------------------------------------------------

    async def _claim_all(self) -> None:
        while True:
            self._room.clear()
            await asyncio.sleep(max(0.0, self._ill_until - time.monotonic()))
            if self.draining or not self._free():
                await self._room.wait()
                continue
            if disk.is_full(self._node.folder):
                log.error("no session is taken: %s", disk.full(self._node.folder))
                self._ill_until = time.monotonic() + ILL_SECONDS
                continue
            claim = Claim(room=self._free(), wait=CLAIM_WAIT, claim_id=secrets.token_hex(8))
            self._claiming = asyncio.create_task(self._claim(claim))
            try:
                await asyncio.wait({self._claiming})
            finally:
                self._claiming.cancel()
            if not self._claiming.cancelled():
                self._claiming.result()
            for lease in list(self._coming.values()):
                await self._take(lease)

    async def _claim(self, claim: Claim) -> None:
        leases = await self._persist(functools.partial(self._coordinator.claim, claim))
        self._coming = {lease.session_id: lease for lease in leases}
        if leases:
            self._idle.clear()

    def _stop_claiming(self) -> None:
        """Whatever the server would answer now is given to nobody: it takes back what it has given to a caller that
        has gone."""
        self.draining = True
        if self._claiming is not None:
            self._claiming.cancel()
        self._room.set()

    def _free(self) -> int:
        """Places in INIT that no session is on its way to."""
        before = ("REGISTERED", "INITIALIZING")
        return self.stages.pools.init - sum(run.record.state in before for run, _ in self._runs.values())

    async def _take(self, lease: Lease) -> None:
        """Begin a session attempt, if it is still this node's."""
        name = lease.session_id
        try:
            if name in self._runs and self._runs[name][0].record.attempt < lease.attempt:
                await self._cut_off(name)  # it lapsed while this node did not notice, and came back to it
            if name not in self._runs and self._coming.get(name) is lease:
                await self._begin(lease)
        except StoreFailure as error:
            with about(task_id=lease.task_id, session_id=name, attempt=lease.attempt):
                log.error("session %s can't be begun here: %s", name, error)
            self._ill_until = time.monotonic() + ILL_SECONDS
            await self._try(self._release(name, lease.attempt, str(error)))
        finally:
            self._coming.pop(name, None)
            self._now_idle()

    async def _begin(self, lease: Lease) -> None:
        record = SessionRecord(
            session_id=lease.session_id,
            task_id=lease.task_id,
            sample_index=lease.sample_index,
            attempt=lease.attempt,
            created_at=lease.created_at,
            updated_at=time.time(),
        )
        try:
            if self._journal is not None:
                await self._journal.put_task(lease.task)
                await self._journal.put_session(record)
            parts = await self._parts_of(lease.task)
        except StoreFailure:
            raise
        except (PolarError, OSError) as error:
            if disk.is_full(self._node.folder):
                raise StoreFailure(f"{disk.full(self._node.folder)} ({error})") from error
            await self._try(self._end_at_once(record, lease.task, str(error) or type(error).__name__))
            return
        except Exception as error:  # a class of the user's own may raise anything
            with about_session(record):
                log.exception("session %s can't be begun", record.session_id)
            await self._try(self._end_at_once(record, lease.task, f"{type(error).__name__}: {error}"))
            return
        if self._coming.get(lease.session_id) is not lease:
            return  # meanwhile it was lost
        run = SessionRun(self._node, lease.task, record, parts, self._changed, self._finish)
        with about_session(record):
            task = asyncio.create_task(self._live(run))
        self._runs[record.session_id] = run, task

    async def _parts_of(self, task: TaskRequest) -> Parts:
        if task.task_id not in self._parts:
            while len(self._parts) >= _PARTS_KEPT:
                del self._parts[next(iter(self._parts))]
            self._parts[task.task_id] = await self._make_parts(task)
        return self._parts[task.task_id]

    async def _end_at_once(self, record: SessionRecord, task: TaskRequest, error: str) -> None:
        ended, result = ended_before_it_began(record, task, self._node.kept_error(error), self.spec.node_id)
        await self._finish(ended, result)
        log_end(ended, result, 0.0)
        self._changed(ended)
        self._to_ship.set()

    async def _finish(self, record: SessionRecord, result: SessionResult) -> None:
        """Into the journal, from where it is handed over; without one the store is the ledger itself."""
        with self._letting_go(record.session_id, record.attempt):
            if self._journal is not None:
                await self._journal.finish_session(record, result)
                self._owed[record.session_id] = record.attempt
            else:
                delivery = Delivery(session_id=record.session_id, attempt=record.attempt, result=result)
                await self._coordinator.deliver(delivery)

    async def _live(self, run: SessionRun) -> None:
        try:
            await self.stages.live(run)
        except StoreConflict as error:
            log.warning("session %s: %s", run.record.session_id, error)
        except PolarError as error:  # the store's word, such as a full disk: no session's fault
            log.error("session %s is given up here, to be run again: %s", run.record.session_id, error)
            self._ill_until = time.monotonic() + ILL_SECONDS
            await self._give_up(run, str(error))
        except Exception as error:
            log.exception("session %s is given up here, to be run again", run.record.session_id)
            await self._give_up(run, f"{type(error).__name__}: {error}")
        finally:
            del self._runs[run.record.session_id]
            self._room.set()
            self._to_ship.set()
            self._now_idle()

    def _now_idle(self) -> None:
        if not self._runs and not self._coming:
            self._idle.set()

    async def _give_up(self, run: SessionRun, error: str) -> None:
        of = (run.record.session_id, run.record.attempt)
        await self._persist(lambda: self._release(*of, error))

    async def _release(self, session_id: str, attempt: int, error: str | None = None) -> None:
        """Hand it back; with an error, because this node could not go on with it."""
        if error is not None:
            error = " ".join(error.encode("utf-8", "replace").decode().split())[:1000]
        with self._letting_go(session_id, attempt):
            await self._coordinator.release(Release(session_id=session_id, attempt=attempt, error=error))

    @contextmanager
    def _letting_go(self, session_id: str, attempt: int) -> Iterator[None]:
        """While the server is told: the answer to a heartbeat on its way may have no lease of it any more."""
        self._leaving.add((session_id, attempt))
        try:
            yield
        finally:
            self._leaving.discard((session_id, attempt))

    def _changed(self, record: SessionRecord) -> None:
        self._room.set()
        self._on_change(record)

    async def _cut_off(self, *names: str) -> None:
        """End what runs here, leaving no trace of an end: these sessions, or all."""
        tasks = [self._runs[name][1] for name in names or list(self._runs) if name in self._runs]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---- leases ------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            began = time.monotonic()
            held = self.held
            try:
                reply = await self._coordinator.heartbeat(self._sign(held))
            except Unreachable as error:
                log.warning("no heartbeat: %s", error)
            except UsageError as error:  # the server has forgotten this node
                log.warning("registering again: %s", error)
                await self._persist(lambda: self._coordinator.register(self.spec))
            else:
                await self._hear(held, reply)
            await asyncio.sleep(HEARTBEAT_SECONDS - min(HEARTBEAT_SECONDS, time.monotonic() - began))

    def _sign(self, held: list[Held]) -> Heartbeat:
        return Heartbeat(held=held, load=self.stages.load(), draining=self.draining)

    async def _say_draining(self) -> None:
        await self._coordinator.heartbeat(self._sign(self.held))  # what it answers is heard at the next one

    async def _hear(self, told: list[Held], reply: HeartbeatReply) -> None:
        for name, reason in reply.cancelled.items():
            if name in self._runs:
                self._runs[name][0].stop(reason)
        now = self.held  # what has been handed over since the question is not lost
        lost = [each for each in told if each.session_id in reply.lost and _is_among(each, now)]
        lost = [each for each in lost if not self._is_over(each)]
        if lost:
            names = ", ".join(each.session_id for each in lost)
            log.warning("lost the leases of %s: they are run elsewhere, or have ended", names)
        for each in lost:  # and no newer attempt, which may have come since
            coming = self._coming.get(each.session_id)
            if coming is not None and coming.attempt == each.attempt:
                del self._coming[each.session_id]
        running = {name: run.record.attempt for name, (run, _) in self._runs.items()}
        over = [each.session_id for each in lost if running.get(each.session_id) == each.attempt]
        if over:  # not here: taking down a large sandbox must not keep the next heartbeat waiting
            cutting = asyncio.create_task(self._cut_off(*over))
            self._cutting.add(cutting)
            cutting.add_done_callback(self._cutting.discard)
        if reply.drain and not self.draining:
            log.info("draining: no more sessions are taken")
            self._stop_claiming()

    def _is_over(self, one: Held) -> bool:
        """It has ended here or is handed back: whether the server still wants it, its answer to that will say."""
        return (one.session_id, one.attempt) in self._leaving or self._owed.get(one.session_id) == one.attempt

    # ---- handing over ------------------------------------------------------------------------------------

    async def _ship_all(self, shipping: Shipping) -> None:
        while True:
            await self._ship_now(shipping)
            try:
                async with asyncio.timeout(SHIP_EVERY):
                    await self._to_ship.wait()
            except TimeoutError:
                pass
            self._to_ship.clear()

    async def _ship_now(self, shipping: Shipping) -> None:
        try:
            await self._persist(shipping.ship)
        except StoreFailure as error:  # what was handed over and could not be struck off is handed over again
            log.error("the journal: %s", error)
            await asyncio.sleep(ILL_SECONDS)

    def _settled(self, session_id: str, attempt: int) -> None:
        if self._owed.get(session_id) == attempt:
            del self._owed[session_id]

    # ---- a server that is away ---------------------------------------------------------------------------

    async def _persist(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until the server answers."""
        tries = 0
        while True:
            try:
                return await ask()
            except Unreachable as error:
                pause = _PAUSES[min(tries, len(_PAUSES) - 1)]
                if tries in (0, 5):
                    log.warning("the rollout server can't be reached: %s; trying again", error)
                tries += 1
                await asyncio.sleep(pause)

    async def _try(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except PolarError as error:
            log.warning("%s", error)


def _is_among(one: Held, held: list[Held]) -> bool:
    return any((each.session_id, each.attempt) == (one.session_id, one.attempt) for each in held)
