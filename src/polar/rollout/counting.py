"""Follows the results as they come into the ledger, by whatever way (a node in this process writes them itself), and
counts them: each session once, from when this server started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from polar.contract.errors import PolarError
from polar.contract.result import SessionResult
from polar.rollout.feed import Feed, within
from polar.store.ledger import Ledger

log = logging.getLogger("polar.rollout")

LOOK_EVERY = 5.0
_PAGE = 200
_HIGHEST = 2**53


async def last_cursor(ledger: Ledger) -> int:
    """The cursor of the newest result (0: there is none), in a few dozen short reads."""
    low, high = 0, _HIGHEST  # there is none after high; all up to low are there
    while low < high:
        middle = (low + high) // 2
        if await ledger.results_after(middle, 1):
            low = middle + 1
        else:
            high = middle
    return low


async def follow_results(ledger: Ledger, feed: Feed, cursor: int, came: Callable[[SessionResult], None]) -> None:
    """Tell of every result after ``cursor``, until cancelled."""
    while True:
        more = feed.results.next()
        try:
            while found := await ledger.results_after(cursor, _PAGE):
                for each in found:
                    came(each.result)
                cursor = found[-1].cursor
        except PolarError as error:
            log.error("results can't be counted: %s", error)
        await within(more, LOOK_EVERY)
        await asyncio.sleep(0)
