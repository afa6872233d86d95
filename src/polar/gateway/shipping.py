"""Why: what a node has captured and finished must reach the server whole, and no single call may be in the way.

A session's calls go before its result, in batches bounded in number and bytes. What the server refuses for good is
set aside in the journal with the reason, and said in the log once; its session ends as ERROR that names it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from polar.contract.arrays import to_plain
from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.contract.result import Reconstruction, SessionResult, Trajectory
from polar.contract.rollout import Delivery
from polar.gateway.coordinator import Coordinator, Refused, Unreachable, Unwelcome
from polar.store.base import StoreConflict
from polar.store.codec import dumps
from polar.store.journal import Journal

log = logging.getLogger("polar.node")

SHIP_AT_ONCE = 64
"""Calls that are read, and at most sent, at a time."""
SHIP_BYTES = 32 * 1024 * 1024
"""Bytes of JSON of the calls of one delivery, unless a single call has more."""
_NAMED = 3


class Shipping:
    """Hands over what is in a journal.

    Args:
        settled: told of each attempt whose result need not be handed over any more.
    """

    def __init__(self, journal: Journal, coordinator: Coordinator, settled: Callable[[str, int], None]) -> None:
        self._journal = journal
        self._coordinator = coordinator
        self._settled = settled

    async def ship(self) -> None:
        """Hand over all that was not yet: a result's calls always before it, so that it is never without them.

        Raises:
            Unreachable: the server can't be had now; what is left is handed over the next time.
            Unwelcome: it does not know this node.
        """
        results = await self._journal.undelivered()
        while calls := await self._journal.unshipped(SHIP_AT_ONCE):
            for batch in await asyncio.to_thread(batches, calls, SHIP_BYTES):
                await self._ship_calls(batch)
        for result in results:
            await self._ship_result(result)
            self._settled(result.session_id, result.attempt)

    async def _ship_calls(self, calls: Sequence[Completion]) -> None:
        """Calls of one attempt: all at once, or one by one where some are refused, and with them all that builds on
        them, because a server could not read it."""
        of = (calls[0].session_id, calls[0].attempt)
        before = await self._journal.refused(*of)
        refused: dict[str, str] = {}
        if before or await self._offer(calls) is not None:
            for call in calls:
                if call.base_id in before or call.base_id in refused:
                    refused[call.completion_id] = f"it builds on {call.base_id}, which was refused"
                elif (why := await self._offer([call])) is not None:
                    refused[call.completion_id] = why
        if refused:
            log.error("session %s attempt %d: %s", *of, _lines(refused), extra=_ids(calls[0]))
            await self._journal.set_aside(refused)
        await self._journal.shipped([call.completion_id for call in calls if call.completion_id not in refused])

    async def _offer(self, calls: Sequence[Completion]) -> str | None:
        """Hand calls over; why they are refused for good, if they are."""
        first = calls[0]
        try:
            await self._deliver(Delivery(session_id=first.session_id, attempt=first.attempt, completions=list(calls)))
        except (StoreConflict, Refused) as error:
            return str(error)
        return None

    async def _ship_result(self, result: SessionResult) -> None:
        of = (result.session_id, result.attempt)
        refused = await self._journal.refused(*of)
        told = _without(result, refused) if refused else result
        try:
            await self._deliver(Delivery(session_id=of[0], attempt=of[1], result=told))
        except StoreConflict as error:  # the attempt is over: what came of it here is history
            log.warning("session %s attempt %d: %s", *of, error, extra=_ids(result))
        except Refused as error:
            why = f"the rollout server refused its result, which is in the journal of its node: {error}"
            log.error("session %s attempt %d: %s", *of, why, extra=_ids(result))
            await self._tell_refused(_unreadable(result, why))
            await self._journal.set_result_aside(*of, str(error))
            return
        await self._journal.delivered(*of)

    async def _tell_refused(self, result: SessionResult) -> None:
        try:
            await self._deliver(Delivery(session_id=result.session_id, attempt=result.attempt, result=result))
        except (StoreConflict, Refused) as error:  # its lease lapses, and the server ends it
            line = "session %s attempt %d: its end is refused, too: %s"
            log.error(line, result.session_id, result.attempt, error, extra=_ids(result))

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            await self._coordinator.deliver(delivery)
        except (Refused, Unwelcome):
            raise
        except UsageError as error:  # 404 and the like: there is no rollout server at this address now
            raise Unreachable(str(error)) from error


def _ids(of: Completion | SessionResult) -> dict[str, object]:
    """What a log line about its attempt names."""
    return {"session_id": of.session_id, "attempt": of.attempt}


def batches(calls: Sequence[Completion], most: int) -> list[list[Completion]]:
    """Calls in their order, together as far as they are of one attempt and have ``most`` bytes or less as JSON."""
    found: list[list[Completion]] = []
    size = 0
    for call in calls:
        own = len(dumps(call))
        last = found[-1][-1] if found else None
        if last is None or (last.session_id, last.attempt) != (call.session_id, call.attempt) or size + own > most:
            found.append([])
            size = 0
        found[-1].append(call)
        size += own
    return found


def _lines(refused: Mapping[str, str]) -> str:
    """What was refused, in one line: the ids of all, and each reason once."""
    reasons = "; ".join(dict.fromkeys(refused.values()))
    return f"refused by the rollout server for good, and set aside in the journal: {', '.join(refused)}: {reasons}"


def _without(result: SessionResult, refused: Mapping[str, str]) -> SessionResult:
    """The end of an attempt some of whose calls the server has not."""
    names, more = list(refused)[:_NAMED], len(refused) - _NAMED
    named = ", ".join(names) + (f" and {more} more" if more > 0 else "")
    error = f"the rollout server refused calls that its node has captured ({named}): {refused[names[0]]}"
    metadata = result.trajectory.metadata
    fates = {
        fate: kept
        for fate, ids in _fates(metadata).items()
        if (kept := [name for name in ids if name not in refused])
    }
    found = {**(metadata.get("reconstruction") or {}), "completions": {**fates, "refused": list(refused)}}
    return _failed(result, error, {**metadata, "reconstruction": found})


def _unreadable(result: SessionResult, error: str) -> SessionResult:
    """The end of an attempt whose result can't be kept as it is: what is left is that it ended, and its calls."""
    calls = [name for ids in _fates(result.trajectory.metadata).values() for name in ids]
    metadata = {
        "record_count": len(calls),
        "trace_count": 0,
        "merge_factor": 0.0,
        "reconstruction": to_plain(Reconstruction(completions={"not_built": calls} if calls else {})),
        "provenance": {},
    }
    return msgspec.structs.replace(_failed(result, error, metadata), timing={}, metadata={})


def _failed(result: SessionResult, error: str, metadata: dict[str, Any]) -> SessionResult:
    trajectory = Trajectory(status="ERROR", metadata=metadata, error=error)
    return msgspec.structs.replace(result, status="ERROR", error=error, trajectory=trajectory)


def _fates(metadata: Mapping[str, Any]) -> dict[str, list[str]]:
    reconstruction = metadata.get("reconstruction") or {}
    fates: dict[str, list[str]] = reconstruction.get("completions") or {}
    return fates
