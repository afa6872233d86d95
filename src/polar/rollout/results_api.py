"""Results over HTTP, for trainers that pull: in order, from a cursor on, acknowledged when they have been dealt with.

A consumer that was cut off before it acknowledged gets the same results again; the cursor is how it knows them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.responses import Response, StreamingResponse

from polar.contract.task import ID_PATTERN
from polar.rollout.dispatch import LONGEST_WAIT
from polar.rollout.feed import Feed, within
from polar.rollout.http import LARGEST_NUMBER, Call, Query, Refused, Route, reply
from polar.rollout.views import Ended, whole
from polar.rollout.wire import WireResult
from polar.store.ledger import Ledger, StoredResult


class Numbered(msgspec.Struct):
    """A result and its place."""

    cursor: int
    result: WireResult


class Page(msgspec.Struct):
    """Results in order. ``cursor`` is that of the last one: acknowledge it, and ask from it on."""

    results: list[Numbered]
    cursor: int
    acknowledged: int


class Acknowledgement(msgspec.Struct, forbid_unknown_fields=True):
    """A consumer has dealt with every result up to ``cursor``."""

    consumer: str
    cursor: int


class ResultsAPI:
    """The routes of results."""

    def __init__(self, ledger: Ledger, feed: Feed, *, allow_import: bool = False) -> None:
        self._ledger = ledger
        self._feed = feed
        self._allow_import = allow_import

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        pull = (
            Query("cursor", "After this one; by default after what the consumer has acknowledged.", int),
            Query("limit", "How many at most.", int, 16, least=1, most=256),
            Query("wait", "Seconds to wait for the first.", float, 0.0, most=LONGEST_WAIT),
            Query("consumer", "Who pulls.", default="default", pattern=ID_PATTERN),
        )
        return [
            Route(
                "GET", "/results", "results.read", "read", self.pull, "Whole results in the order they came.",
                query=pull, answer=Page, audited=lambda _: True,
            ),
            Route(
                "POST", "/results/ack", "results.ack", "submit", self.acknowledge, "Results have been dealt with.",
                body=Acknowledgement,
            ),
        ]  # fmt: skip

    async def pull(self, call: Call) -> Response:
        acknowledged = await self._ledger.acknowledged(call.query["consumer"])
        cursor = acknowledged if call.query["cursor"] is None else call.query["cursor"]
        found = await call.while_connected(self._after(cursor, call.query["limit"], call.query["wait"]))
        return StreamingResponse(self._page(found, cursor, acknowledged), media_type="application/json")

    async def acknowledge(self, call: Call) -> Response:
        ack: Acknowledgement = call.body
        Query("consumer", "", pattern=ID_PATTERN).read(ack.consumer)
        if not 0 <= ack.cursor <= LARGEST_NUMBER:
            raise Refused(422, "cursor must be that of a result")
        if ack.cursor and not await self._ledger.results_after(ack.cursor - 1, 1):
            # Else results that are still to come would count as dealt with.
            why = "it has not come yet, or retention has removed it and all after it, and then nothing is left to do"
            raise Refused(422, f"there is no result {ack.cursor}: {why}")
        await self._ledger.acknowledge(ack.consumer, ack.cursor)
        return reply({"consumer": ack.consumer, "cursor": await self._ledger.acknowledged(ack.consumer)})

    async def _after(self, cursor: int, limit: int, seconds: float) -> list[StoredResult]:
        until = time.monotonic() + seconds
        while True:
            more = self._feed.results.next()
            found = await self._ledger.results_after(cursor, limit)
            left = until - time.monotonic()
            if found or left <= 0 or self._feed.closed:
                return found
            await within(more, left)

    async def _page(self, found: Sequence[StoredResult], cursor: int, acknowledged: int) -> AsyncIterator[bytes]:
        yield b'{"results":['
        separator = b""
        for one in found:
            record = await self._ledger.session(one.result.session_id)
            if record is None:
                continue  # retention was faster
            body = await whole(self._ledger, Ended(record, one.result), allow_import=self._allow_import)
            yield b'%s{"cursor":%d,"result":%s}' % (separator, one.cursor, body)
            separator = b","
        last = found[-1].cursor if found else cursor
        yield b'],"cursor":%d,"acknowledged":%d}' % (last, acknowledged)
