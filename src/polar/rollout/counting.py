"""Follows the results as they come into the ledger, by whatever way (a node in this process writes them itself), and
counts them: each session once, from when this server started."""

from __future__ import annotations

from collections.abc import Callable

from polar.background import forever
from polar.contract.result import SessionResult
from polar.rollout.feed import Feed, within
from polar.store.ledger import Ledger

LOOK_EVERY = 5.0
_PAGE = 200


async def follow_results(ledger: Ledger, feed: Feed, cursor: int, came: Callable[[SessionResult], None]) -> None:
    """Tell of every result after ``cursor``, until cancelled."""

    async def step() -> None:
        nonlocal cursor
        more = feed.results.next()
        while found := await ledger.results_after(cursor, _PAGE):
            for each in found:
                cursor = each.cursor
                came(each.result)
        await within(more, LOOK_EVERY)

    await forever(step, "results can't be counted")
