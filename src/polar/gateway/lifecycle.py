"""The stages of many sessions at once, each stage with places of its own.

    REGISTERED -> INITIALIZING -> READY -> RUNNING -> POST_RUN (BUILDING, EVALUATING)
                                                   -> COMPLETED | ERROR | TIMEOUT

A session in INIT prepares its runtime, takes a place in READY, a bounded buffer, and only then makes room for the
next; from READY it goes on to RUNNING as soon as there is a place, and from there to POST_RUN. Waiting between
stages costs a session nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from polar.contract.errors import PolarError
from polar.contract.rollout import NodeLoad
from polar.gateway.session_log import about_session
from polar.gateway.session_run import SessionRun
from polar.store.base import StoreFailure
from polar.waits import Waits

log = logging.getLogger("polar.sessions")


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Places of each stage, 1 or more; ``ready`` is how many prepared sessions may wait for a place to run."""

    init: int = 2
    ready: int = 2
    run: int = 4
    post_run: int = 2


class Stages:
    """Takes sessions through their stages.

    Args:
        pools: how many sessions may be in each stage at a time.
    """

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self._init = Places(pools.init)
        self._ready = Places(pools.ready)
        self._run = Places(pools.run)
        self._post_run = Places(pools.post_run)

    @property
    def places(self) -> dict[str, Places]:
        """The places of each stage, by its name."""
        return {"init": self._init, "ready": self._ready, "run": self._run, "post_run": self._post_run}

    def load(self) -> NodeLoad:
        """How many sessions wait for and are in each stage."""
        return NodeLoad(
            init_queue_depth=self._init.waiting,
            init_inflight=self._init.taken,
            ready_depth=self._ready.taken,
            run_inflight=self._run.taken,
            postrun_queue_depth=self._post_run.waiting,
            postrun_inflight=self._post_run.taken,
        )

    async def live(self, run: SessionRun) -> None:
        """Take one session to its end: a terminal state and a result in the store.

        When cancelled, the session is left as the store knows it (to be run again as a new attempt), and nothing
        of it goes on running.

        Raises:
            PolarError: the store can't keep it. What a session can't do ends as its result.
        """
        with about_session(run.record):
            try:
                await run.guard(self._until_it_ran(run))
                await run.ran()
                async with self._post_run.one():
                    await run.finish()
            finally:
                await run.release()

    async def _until_it_ran(self, run: SessionRun) -> None:
        async with self._init.one():
            if not await _stage(run, run.initialize):
                return
            await self._ready.take()
        try:
            await run.ready()
            await self._run.take()
        finally:
            self._ready.give()
        try:
            await _stage(run, run.run)
        finally:
            self._run.give()


class Places:
    """A semaphore that says how full it is, how many wait for it, and how long they waited."""

    def __init__(self, places: int) -> None:
        self.waiting = 0
        self.taken = 0
        self.waits = Waits()
        self._free = asyncio.Semaphore(places)

    async def take(self) -> None:
        self.waiting += 1
        try:
            with self.waits.timed():
                await self._free.acquire()
        finally:
            self.waiting -= 1
        self.taken += 1

    def give(self) -> None:
        self.taken -= 1
        self._free.release()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        await self.take()
        try:
            yield
        finally:
            self.give()


async def run_sessions(runs: Sequence[SessionRun], pools: Pools) -> None:
    """Take every session to its end; when cancelled, none of them goes on running.

    Raises:
        PolarError: the store can't keep one; the others were cut off.
    """
    stages = Stages(pools)
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(stages.live(run))
    except* PolarError as errors:
        raise _first(errors) from None


def _first(error: BaseException) -> BaseException:
    """The first single error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _stage(run: SessionRun, stage: Callable[[], Awaitable[None]]) -> bool:
    """Run one stage; a failure ends the session as ERROR and not the others."""
    try:
        await stage()
    except StoreFailure:  # no session's fault either
        raise
    except (PolarError, OSError) as error:
        if _disk_full(error):
            raise PolarError(f"the disk is full: make room and run it again to go on ({error})") from error
        run.fail(str(error) or type(error).__name__)
        return False
    except Exception as error:
        log.exception("session %s", run.record.session_id)
        run.fail(f"{type(error).__name__}: {error}")
        return False
    return True


def _disk_full(error: BaseException | None) -> bool:
    """A full disk is no session's fault: none may end because of it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return True
        error = error.__cause__
    return False
