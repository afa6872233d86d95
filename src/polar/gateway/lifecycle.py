"""The stages of many sessions at once, each stage with workers of its own.

    REGISTERED -> INITIALIZING -> READY -> RUNNING -> POST_RUN (BUILDING, EVALUATING)
                                                   -> COMPLETED | ERROR | TIMEOUT

INIT workers prepare runtimes and put them into READY, a bounded buffer, and go on to the next; RUN workers
take them out and run the harness; POST_RUN workers build the traces and evaluate. Waiting between stages
costs a session nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from polar.contract.errors import PolarError
from polar.gateway.session_run import SessionRun

log = logging.getLogger("polar.sessions")


class Pools(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of each stage, and how many prepared sessions may wait in READY."""

    init: int = 2
    ready: int = 2
    run: int = 4
    post_run: int = 2


async def run_sessions(runs: Sequence[SessionRun], pools: Pools) -> None:
    """Take every session to its end: a terminal state and a result in the store.

    When cancelled, sessions that have not ended are left as the store knows them (to be run again as a new
    attempt), and nothing of them goes on running.
    """
    waiting: asyncio.Queue[SessionRun] = asyncio.Queue()
    ready: asyncio.Queue[SessionRun] = asyncio.Queue(maxsize=pools.ready)
    ran: asyncio.Queue[SessionRun] = asyncio.Queue()
    left = len(runs)
    all_done = asyncio.Event()

    async def initialize(run: SessionRun) -> None:
        if await _stage(run, run.initialize):
            await run.ready()
            await ready.put(run)
        else:
            await ran.put(run)

    async def execute(run: SessionRun) -> None:
        await _stage(run, run.run)
        await ran.put(run)

    async def finish(run: SessionRun) -> None:
        nonlocal left
        await run.finish()
        left -= 1
        if left == 0:
            all_done.set()

    for run in runs:
        waiting.put_nowait(run)
    try:
        async with asyncio.TaskGroup() as group:
            workers = [
                group.create_task(_work(queue, step))
                for queue, step, count in (
                    (waiting, initialize, pools.init),
                    (ready, execute, pools.run),
                    (ran, finish, pools.post_run),
                )
                for _ in range(count)
            ]
            if runs:
                await all_done.wait()
            for worker in workers:
                worker.cancel()
    except* PolarError as group:
        # What a session can't do ends as its result; what gets here is the store's word, and ends the run.
        raise _first(group) from None
    finally:
        for run in runs:
            await run.release()


def _first(error: BaseException) -> BaseException:
    """The first single error in a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _work(queue: asyncio.Queue[SessionRun], step: Callable[[SessionRun], Awaitable[None]]) -> None:
    while True:
        await step(await queue.get())


async def _stage(run: SessionRun, stage: Callable[[], Awaitable[None]]) -> bool:
    """Run one stage; a failure ends the session as ERROR and not the others."""
    try:
        await stage()
    except (PolarError, OSError) as error:
        if _disk_full(error):
            raise PolarError(f"the disk is full: make room and run it again to go on ({error})") from error
        run.fail(str(error))
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
