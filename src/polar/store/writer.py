"""One thread that writes, and commits in groups: a sync of the disk costs the same for one write as for fifty.

Writes queued while the disk is busy form the next group, and every group is one transaction with one sync and
one hand-over each way between the threads. Which batch is on its way is known on the event loop's side alone,
so there is nothing to lock. Each write has a savepoint of its own: one that is refused takes no other with it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from polar.store.connection import Apply, T, Writes


class _Write(NamedTuple):
    apply: Apply[Any]
    done: asyncio.Future[Any]


class _Outcome(NamedTuple):
    """What a write has returned, or the error that refused it."""

    value: Any = None
    error: Exception | None = None


class GroupWriter:
    """Owns the writing connection.

    Args:
        db: the connection; closed by ``close``.
    """

    def __init__(self, db: Writes) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Write] = []
        self._handing_over = False  # from the first write of a group until the group before it is committed
        self._batches: queue.SimpleQueue[list[_Write] | None] = queue.SimpleQueue()
        self._stopped: asyncio.Future[None] = self._loop.create_future()
        # A daemon: an event loop that ended without close() must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="polar-store-writer", daemon=True)
        self._thread.start()

    def submit(self, apply: Apply[T]) -> asyncio.Future[T]:
        """Queue a write. The future has what it returned after its commit, or the error that refused it; cancelling
        the future does not take the write back."""
        done: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(_Write(apply, done))
        if not self._handing_over:
            self._handing_over = True
            self._loop.call_soon(self._hand_over)  # after all that is ready to run now has queued its own
        return done

    async def close(self) -> None:
        """Commit what is queued, then close the connection. No write may be queued afterwards."""
        self._batches.put(self._waiting)
        self._waiting = []
        self._batches.put(None)
        await asyncio.shield(self._stopped)

    def _hand_over(self) -> None:
        self._handing_over = bool(self._waiting)
        if self._waiting:
            batch, self._waiting = self._waiting, []
            self._batches.put(batch)

    def _settle(self, batch: list[_Write], outcomes: list[_Outcome]) -> None:
        for write, outcome in zip(batch, outcomes, strict=True):
            if write.done.done():
                continue  # its caller was cancelled
            if outcome.error is None:
                write.done.set_result(outcome.value)
            else:
                write.done.set_exception(outcome.error)
        self._loop.call_soon(self._hand_over)  # after the callers just released have queued what comes next

    # On the thread.

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._tell(self._settle, batch, self._commit(batch))
        self._db.close()
        self._tell(self._stop)

    def _stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is waiting any more
            return

    def _commit(self, batch: list[_Write]) -> list[_Outcome]:
        db, tries = self._db, 0
        while True:
            try:
                db.begin()
                outcomes = [self._apply(write.apply) for write in batch]
                db.commit()
                return outcomes
            except Exception as error:
                db.rollback()
                tries += 1
                recovery = db.recover(error, tries, len(batch))
                if recovery == "apart":
                    return [self._commit([write])[0] for write in batch]
                if recovery == "failed":
                    return [_Outcome(error=db.explain(error)) for _ in batch]

    def _apply(self, apply: Apply[Any]) -> _Outcome:
        db = self._db
        db.execute("SAVEPOINT one")
        try:
            value = apply(db)
        except Exception as error:
            if not db.survives(error):
                raise
            db.execute("ROLLBACK TO SAVEPOINT one")
            db.execute("RELEASE SAVEPOINT one")
            return _Outcome(error=db.explain(error))
        db.execute("RELEASE SAVEPOINT one")
        return _Outcome(value)
