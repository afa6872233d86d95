"""Why: while a trainer changes the weights, nobody may sample, and no harness may notice. One object says whether
calls may go to the engine now and how many are there, and which weights they sample from where the engine does
not say so itself.

These are the means of ``/admin/inference/*``; one object serves all sessions of a gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec

from polar.waits import Waits

log = logging.getLogger("polar.gateway")


class InferenceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """``inflight`` calls are at the engine; ``waiting`` calls are held until inference goes on. ``version`` is what
    the operator has set."""

    paused: bool
    inflight: int
    waiting: int
    version: str | None


class Admission:
    """A call's place at the engine, held for the length of ``InferenceControl.admitted`` or given back meanwhile."""

    def __init__(self, control: InferenceControl) -> None:
        self._control = control
        self._inside = False

    async def enter(self) -> None:
        """Take the place, once inference is not paused."""
        await self._control._enter()
        self._inside = True

    def leave(self) -> None:
        """Give the place back (again: no effect)."""
        if self._inside:
            self._inside = False
            self._control._leave()


class InferenceControl:
    """The gate before the engine, and the weight version that the operator has set."""

    def __init__(self) -> None:
        self.version: str | None = None
        self.waits = Waits()
        self._inflight = 0
        self._waiting = 0
        self._paused = False
        self._drains: set[asyncio.Future[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._warned: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()

    # ---- what an operator does ---------------------------------------------------------------------------

    def status(self) -> InferenceStatus:
        """How it stands now."""
        return InferenceStatus(
            paused=self._paused, inflight=self._inflight, waiting=self._waiting, version=self.version
        )

    async def pause(self, timeout_seconds: float) -> InferenceStatus:
        """Hold new calls (their clients get keep-alives) and wait until those in flight have ended.

        If they do not within ``timeout_seconds``, or someone resumes meanwhile, the pause is undone: the status
        says ``paused: false``, and how many were still in flight.
        """
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drains.add(drained)
        self._turn()
        try:
            async with asyncio.timeout(timeout_seconds):
                await drained
        except TimeoutError:
            pass
        finally:
            self._drains.discard(drained)
            self._turn()
        return self.status()

    def resume(self) -> InferenceStatus:
        """Let held calls go on. A pause that still waits is undone."""
        self._paused = False
        drains, self._drains = self._drains, set()
        for drained in drains:
            if not drained.done():
                drained.set_result(None)
        self._turn()
        return self.status()

    def set_version(self, version: str | int) -> InferenceStatus:
        """From the next token on the weights have this name, where the engine itself names none."""
        if str(version) != self.version:
            self._warned.clear()
        self.version = str(version)
        return self.status()

    # ---- what calls do -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[Admission]:
        """A place at the engine, as soon as inference is not paused."""
        admission = Admission(self)
        await admission.enter()
        try:
            yield admission
        finally:
            admission.leave()

    def disagreement(self, told: Sequence[str], reported: Sequence[str]) -> str:
        """One line on versions that were set here and others that the engine reports; logged once per change."""
        names = (tuple(told), tuple(reported))
        line = f"weight version {', '.join(told)} was set, but the engine reports {', '.join(reported)}, which counts"
        if names not in self._warned:
            self._warned.add(names)
            log.warning("%s: set it at the engine too", line)
        return line

    async def _enter(self) -> None:
        self._waiting += 1
        try:
            with self.waits.timed():
                while not self._open.is_set():
                    await self._open.wait()
        finally:
            self._waiting -= 1
        self._inflight += 1

    def _leave(self) -> None:
        self._inflight -= 1
        self._turn()

    def _turn(self) -> None:
        """Set the gate, and tell those who wait for the last call to end."""
        if self._drains and not self._inflight:
            self._paused = True
            for drained in self._drains:
                if not drained.done():
                    drained.set_result(None)
        if self._paused or self._drains:
            self._open.clear()
        else:
            self._open.set()
