"""Bare capture sessions that live on a node which is apart from this server. They have no lease: a bare session is on
one node from first to last, its record names that node, and the node's word on it is taken and nobody else's.
"""

from __future__ import annotations

import logging
import time

import msgspec

from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.rollout import BARE_NODE, Delivery
from polar.contract.task import BuilderSpec
from polar.results import rebuild
from polar.store.base import SessionRecord, StoreConflict
from polar.store.ledger import Ledger
from polar.trajectories.assemble import unbuilt

log = logging.getLogger("polar.rollout")

GONE_AFTER = 300.0
"""Seconds without a sign of life of its node after which a bare session has ended."""


async def keep(ledger: Ledger, record: SessionRecord, delivery: Delivery) -> None:
    """What its node hands over of a bare session.

    Raises:
        StoreConflict: it has ended otherwise, or was forgotten.
        ValueError: the delivery is of something else.
    """
    for completion in delivery.completions:
        if (completion.session_id, completion.attempt) != (record.session_id, record.attempt):
            raise ValueError(f"completion {completion.completion_id} is of another session")
        await ledger.put_completion(completion)
    result = delivery.result
    if result is None:
        return
    if result.session_id != record.session_id or result.attempt != record.attempt:
        raise ValueError("the result is of another session")
    await _end(ledger, record, msgspec.structs.replace(result, task_id=record.task_id))


async def end_orphans(ledger: Ledger) -> None:
    """End the bare sessions whose nodes are gone, with what was captured of them."""
    now = time.time()
    there = {node.node_id for node in await ledger.nodes(now) if now - node.last_heartbeat < GONE_AFTER}
    for record in await ledger.sessions():
        node = record.metadata.get(BARE_NODE)
        if node is None or node in there or record.state in TERMINAL_STATES or now - record.updated_at < GONE_AFTER:
            continue
        error = f"cut off: node {node} was lost"
        completions = await ledger.completions(record.session_id, record.attempt)
        trajectory = unbuilt(completions, BuilderSpec(), {})
        trajectory.error = error
        result = SessionResult(
            session_id=record.session_id,
            task_id=record.task_id,
            attempt=record.attempt,
            status="ERROR",
            trajectory=trajectory,
            node_id=node,
            error=error,
        )
        result = await rebuild(ledger, result)
        try:
            await _end(ledger, record, result)
        except StoreConflict as conflict:
            log.warning("session %s: %s", record.session_id, conflict)


async def _end(ledger: Ledger, record: SessionRecord, result: SessionResult) -> None:
    ended = record
    if record.state not in TERMINAL_STATES:
        ended = msgspec.structs.replace(record, state=result.status, error=result.error, updated_at=time.time())
    await ledger.finish_session(ended, result, stored=True)
