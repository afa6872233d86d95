"""Why: each stage of a session has a time of its own, and whoever's time is over must be told which one it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polar.contract.errors import PolarError


class Budget:
    """A time limit in seconds that says which stage ran over it.

    Raises:
        PolarError: on the way out, when the time was over.
    """

    def __init__(self, stage: str, seconds: float) -> None:
        self._stage, self._seconds = stage, seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> Budget:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError:
            raise PolarError(f"{self._stage} took longer than its {self._seconds:g} s") from None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While something is done that has a budget of its own. Not to be entered twice at a time."""
        clock, end = asyncio.get_running_loop().time, self._timeout.when()
        assert end is not None
        left = end - clock()
        self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._timeout.reschedule(clock() + left)
