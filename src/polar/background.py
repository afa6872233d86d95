"""Why: what goes on in the background has nobody who would see it fail. A loop that ends at an error, of whatever
kind, is missed only much later: so none does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from polar.contract.errors import PolarError

log = logging.getLogger("polar.background")

AFTER_FAILURE = 1.0
"""Seconds before what has failed is tried again, at least."""


async def forever(step: Callable[[], Awaitable[Any]], what: str, *, every: float = 0.0) -> None:
    """Take a step again and again, until cancelled.

    Args:
        step: it may wait itself for there being something to do.
        what: it is for; said in the log when it fails.
        every: seconds between two steps.
    """
    while True:
        pause = every
        try:
            await step()
        except PolarError as error:
            log.error("%s: %s", what, error)
            pause = max(every, AFTER_FAILURE)
        except Exception:
            log.exception("%s", what)
            pause = max(every, AFTER_FAILURE)
        await asyncio.sleep(pause)
