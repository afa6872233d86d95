"""Sessions out, calls and results in: what a gateway node asks of the rollout server.

The HTTP routes and, in one process, the node itself call exactly these methods, so both see the same rules. All of
them may be repeated: the ledger knows what was done before.
"""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from polar.contract.errors import UsageError
from polar.contract.result import TERMINAL_STATES
from polar.contract.rollout import (
    BARE_NODE,
    HEARTBEAT_SECONDS,
    Claim,
    Delivery,
    Heartbeat,
    HeartbeatReply,
    Lease,
    NodeInfo,
    NodeSpec,
    Release,
)
from polar.contract.task import TaskRequest
from polar.rollout import bare
from polar.rollout.feed import Feed, within
from polar.rollout.metrics import Metrics
from polar.store.base import SessionRecord, StoreFailure
from polar.store.ledger import Ledger

log = logging.getLogger("polar.rollout")

LEASE_SECONDS = 10.0
SILENT_SECONDS = 2.5 * HEARTBEAT_SECONDS
"""A node that was not heard of for so long may be gone, and is given nothing. A server that did not look for lapsed
leases for so long has not heard of anybody."""
LONGEST_WAIT = 60.0
"""Seconds that one question may stay open."""
MOST_ROOM = 1024
"""Sessions that one claim may take."""


class UnknownNode(UsageError):
    """The node is not registered (any more): it registers again."""


class Dispatch:
    """The rules between a ledger and its nodes.

    Args:
        feed: tells of work; poked after every write.
    """

    def __init__(self, ledger: Ledger, feed: Feed, metrics: Metrics) -> None:
        self._ledger = ledger
        self._feed = feed
        self._metrics = metrics
        self._heard: dict[str, float] = {}
        self._grace = LEASE_SECONDS
        self._listening_since = self._looked_at = time.monotonic()

    # ---- what nodes do -----------------------------------------------------------------------------------

    async def register(self, spec: NodeSpec) -> NodeInfo:
        """A node is here (again)."""
        now = time.time()
        await self._ledger.put_node(spec, now)
        self._feed.poke()
        return await self.node(spec.node_id)

    async def claim(self, node_id: str, claim: Claim) -> list[Lease]:
        """Up to ``claim.room`` sessions to run, each under a lease; none after ``claim.wait`` seconds without any.
        None to a node that has fallen silent meanwhile: it would not hear of them, and their leases would lapse.

        Raises:
            UsageError: room or wait are out of range.
        """
        if not 1 <= claim.room <= MOST_ROOM or not 0 <= claim.wait <= LONGEST_WAIT:
            raise UsageError(f"room must be from 1 to {MOST_ROOM}, wait from 0 to {LONGEST_WAIT:g}")
        loop = asyncio.get_running_loop()
        until = loop.time() + claim.wait
        self._heard[node_id] = time.monotonic()
        while True:
            work = self._feed.work.next()
            if self._is_silent(node_id):
                return []
            with self._metrics.write("claim"):
                leases = await self._claim(node_id, claim)
            left = until - loop.time()
            if leases:
                self._feed.poke()
            if leases or left <= 0 or self._feed.closed:
                return leases
            await within(work, left)

    def _is_silent(self, node_id: str) -> bool:
        return time.monotonic() - self._heard.get(node_id, 0.0) > SILENT_SECONDS

    async def _claim(self, node_id: str, claim: Claim) -> list[Lease]:
        work = self._ledger.claim(node_id, claim.room, LEASE_SECONDS, time.time(), claim_id=claim.claim_id)
        asking = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            # The node has gone away, and does not know what it was given: others should have it now.
            for lease in await asking:
                await self._ledger.release(node_id, lease.session_id, lease.attempt, time.time())
            self._feed.poke()
            raise

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> HeartbeatReply:
        """Renew the leases of what the node holds, and hear what else has become of it.

        Raises:
            UnknownNode: it must register again.
        """
        now = time.time()
        if not await self._ledger.node_load(node_id, beat.load, now):
            raise UnknownNode(f"node {node_id} is not registered")
        self._heard[node_id] = time.monotonic()
        try:
            with self._metrics.write("renew"):
                reply = await self._ledger.renew(node_id, beat.held, LEASE_SECONDS, now)
            if beat.draining and not reply.drain:
                await self._ledger.drain(node_id, now)
        except StoreFailure:
            self._listening_since = time.monotonic()
            raise
        self._feed.poke()
        return reply

    async def deliver(self, node_id: str, delivery: Delivery) -> None:
        """Keep captured calls, and the result that ends an attempt. A result of a node is under its own name.

        Raises:
            StoreConflict: the node does not hold this attempt, or it ended with another result.
            UsageError: the calls or the result are of something else.
        """
        result = delivery.result
        known = await self._ledger.session(delivery.session_id)
        if result is not None:
            delivery = msgspec.structs.replace(delivery, result=msgspec.structs.replace(result, node_id=node_id))
        try:
            with self._metrics.write("deliver"):
                if known is not None and known.metadata.get(BARE_NODE) == node_id:
                    await bare.keep(self._ledger, known, delivery)
                else:
                    await self._ledger.deliver(node_id, delivery, time.time())
        except ValueError as error:
            raise UsageError(f"delivery of session {delivery.session_id}: {error}") from None
        self._feed.poke()

    async def release(self, node_id: str, release: Release) -> None:
        """A node hands a session attempt back, unfinished: it may be claimed again at once, or has ended, because
        nodes could not go on with it too often."""
        of = (release.session_id, release.attempt)
        await self._ledger.release(node_id, *of, time.time(), error=release.error)
        self._feed.poke()

    async def drain(self, node_id: str) -> NodeInfo:
        """The node shall take no more.

        Raises:
            UnknownNode: there is none of that name.
        """
        info = await self._ledger.drain(node_id, time.time())
        if info is None:
            raise UnknownNode(f"node {node_id} is not known")
        self._feed.poke()
        return info

    # ---- what trainers and operators do ------------------------------------------------------------------

    async def submit(self, task: TaskRequest) -> bool:
        """Take a task in; whether it is new.

        Raises:
            StoreConflict: its id exists with another body.
        """
        with self._metrics.write("submit"):
            new = await self._ledger.submit(task, time.time())
        self._feed.poke()
        return new

    async def cancel(self, task_id: str) -> bool:
        """End a task; whether there is such a task."""
        ended = await self._ledger.cancel(task_id, time.time())
        self._feed.poke()
        return ended is not None

    async def node(self, node_id: str) -> NodeInfo:
        """A node as the ledger knows it.

        Raises:
            UnknownNode: there is none of that name.
        """
        for info in await self._ledger.nodes(time.time()):
            if info.node_id == node_id:
                return info
        raise UnknownNode(f"node {node_id} is not known")

    # ---- what time does ----------------------------------------------------------------------------------

    async def expire(self) -> list[SessionRecord]:
        """Take back the leases that have lapsed; the sessions, as they are now. Called every second or so.

        Where nodes could not be heard for a while (no server was here, it was stopped, the ledger could not be
        written), they have the time of a lease to say that they are there, before any is taken back.
        """
        began = time.monotonic()
        self._heard = {name: heard for name, heard in self._heard.items() if began - heard <= SILENT_SECONDS}
        if began - self._looked_at > SILENT_SECONDS:
            self._listening_since = began
        self._looked_at = began
        if began - self._listening_since < self._grace:
            return []
        try:
            taken = await self._ledger.expire(time.time())
        except StoreFailure:
            self._listening_since = time.monotonic()
            raise
        for record in taken:
            log.warning(
                "the lease of session %s lapsed: %s",
                record.session_id,
                record.error if record.state in TERMINAL_STATES else f"it becomes attempt {record.attempt}",
                extra={"session_id": record.session_id, "task_id": record.task_id},
            )
        self._metrics.leases_expired.inc(len(taken))
        if taken:
            self._feed.poke()
        return taken
