"""Why: trainers, nodes and dashboards wait for things to happen, and must not ask the database in a loop. One reader
follows the ledger's events and wakes those whom an event concerns.

Writes of this process poke the reader, so that waiters hear of them at once; what other rollout servers write into
the same database is found by a slow poll.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from weakref import WeakValueDictionary

from polar.background import forever
from polar.contract.result import TERMINAL_STATES
from polar.contract.rollout import Event
from polar.store.ledger import Ledger

POLL_SECONDS = 1.0
"""How long an event of another server may go unnoticed here."""
_PAGE = 1000


class Signal:
    """Something that happens again and again. Take ``next`` before you look, then wait for it."""

    def __init__(self) -> None:
        self._next: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Done when it happens the next time."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        return self._next

    def set(self) -> None:
        """It happens now."""
        future, self._next = self._next, None
        if future is not None and not future.done():
            future.set_result(None)


async def within(future: asyncio.Future[None], seconds: float) -> None:
    """Wait for the future, ``seconds`` at most. It may be shared: it is not cancelled."""
    await asyncio.wait({future}, timeout=max(0.0, seconds))


class Feed:
    """Follows the events of a ledger.

    ``work`` happens when there may be a session to claim, ``results`` when one has ended, ``any`` with every event.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.last = 0
        """The newest event that was seen."""
        self.closed = False
        self.work = Signal()
        self.results = Signal()
        self.any = Signal()
        self._ledger = ledger
        self._tasks: WeakValueDictionary[str, Signal] = WeakValueDictionary()
        self._poked = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on from the newest event."""
        self.last = await self._ledger.newest_event()
        self._reader = asyncio.create_task(forever(self._follow, "events can't be read"))

    async def close(self) -> None:
        """Stop following; whoever waits is woken, to find the feed closed."""
        self.closed = True
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.wait([reader])
        for signal in (self.work, self.results, self.any, *self._tasks.values()):
            signal.set()

    def poke(self) -> None:
        """Something was written here: look now."""
        self._poked.set()

    def ended(self, task_id: str) -> Signal:
        """Happens when this task has ended. Hold it as long as you wait."""
        signal = self._tasks.get(task_id)
        if signal is None:
            signal = self._tasks[task_id] = Signal()
        return signal

    async def _follow(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await self._poked.wait()
        self._poked.clear()
        while events := await self._ledger.events_after(self.last, _PAGE):
            self.last = events[-1].id
            for event in events:
                self._tell(event)
            self.any.set()

    def _tell(self, event: Event) -> None:
        if event.kind == "task":
            if event.state == "running":
                self.work.set()
            elif event.subject in self._tasks:
                self._tasks[event.subject].set()
        elif event.kind == "session":
            if event.state == "REGISTERED":
                self.work.set()
            elif event.state in TERMINAL_STATES:
                self.results.set()
