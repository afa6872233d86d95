"""Why: whoever tries keys or tokens until one fits gets 401 each time, and the operator must come to know of it. Each
try is counted; the log has the first at once and those after it as one line a while, so that a flood fills no disk.
What was tried is never kept: it may be a real secret, mistyped.
"""

from __future__ import annotations

import asyncio
import logging

log = logging.getLogger("polar.refused")

EVERY = 10.0
"""Seconds from one line to the next, at least."""


class Guesses:
    """Requests with a credential that is nobody's, or with none.

    Args:
        what: the credential, as the log calls it.
    """

    def __init__(self, what: str) -> None:
        self.count = 0
        """So many were refused."""
        self._what = what
        self._untold = 0
        self._last = ""
        self._quiet: asyncio.TimerHandle | None = None

    def refused(self, address: str | None) -> None:
        """One was refused, which came from this address."""
        self.count += 1
        self._untold += 1
        self._last = address or "a sandbox"
        if self._quiet is None:
            self._tell()

    def _tell(self) -> None:
        self._quiet = None
        if self._untold:
            log.warning("refused %d times: unknown %s, the last time from %s", self._untold, self._what, self._last)
            self._untold = 0
            self._quiet = asyncio.get_running_loop().call_later(EVERY, self._tell)
