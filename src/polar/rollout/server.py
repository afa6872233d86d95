"""The rollout server: an ASGI app over a ledger, and what must go on whether anybody calls or not.

    leases that lapse are taken back · callbacks are delivered · what is old is forgotten

Any number of these may work on one PostgreSQL ledger; one of them dying costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from polar.background import forever
from polar.contract.task import TaskRequest
from polar.rollout.app import App, app
from polar.rollout.audit_api import AuditAPI
from polar.rollout.auth import Audit, Credentials
from polar.rollout.bare import end_orphans
from polar.rollout.browsers import OwnNames
from polar.rollout.callbacks import CallbackConfig, Callbacks
from polar.rollout.counting import follow_results
from polar.rollout.dispatch import Dispatch
from polar.rollout.feed import Feed
from polar.rollout.hosting import CaptureHost, Fleet, Inference
from polar.rollout.http import Route
from polar.rollout.inference_api import InferenceAPI
from polar.rollout.metrics import Metrics
from polar.rollout.nodes_api import NodesAPI
from polar.rollout.openapi import openapi
from polar.rollout.results_api import ResultsAPI
from polar.rollout.sessions_api import SessionsAPI
from polar.rollout.tasks_api import TasksAPI, check_task
from polar.rollout.tracing import SessionTraces
from polar.rollout.watch_api import WatchAPI
from polar.runtimes import refuse_unsupported
from polar.store.ledger import Ledger

log = logging.getLogger("polar.rollout")

EXPIRE_EVERY = 1.0
PURGE_EVERY = 600.0
ORPHANS_EVERY = 60.0
FORGET_EVERY = 10.0


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how many days ended tasks and sessions are kept; ``None``: for ever. A gateway that is apart keeps in its
    journal for as long what the server has from it, too; ``None``: for a day."""

    days: float | None = None


class RolloutServer:
    """The control plane.

    Args:
        ledger: an open ledger; it stays the caller's to close.
        callback_secret: signs callbacks.
        capture, inference: the gateway of this process; without them those of the nodes are asked.
        metrics: with a registry in which others have numbers, too.
        traces: where sessions become OpenTelemetry traces; closed with the server.
        check: refuses further tasks that may not be run here, with a UsageError.
        allow_import: tasks may name classes of their own: those that ``check`` lets through.
        loopback_only: callers are on this machine, and so may be the receivers of callbacks.
        urls: where it is reached.
    """

    def __init__(
        self,
        ledger: Ledger,
        credentials: Credentials,
        *,
        callback_secret: str,
        callbacks: CallbackConfig | None = None,
        retention: RetentionConfig | None = None,
        capture: CaptureHost | None = None,
        inference: Inference | None = None,
        metrics: Metrics | None = None,
        traces: SessionTraces | None = None,
        check: Callable[[TaskRequest], None] | None = None,
        allow_import: bool = False,
        loopback_only: bool = True,
        urls: Sequence[str] = (),
    ) -> None:
        self.metrics = metrics if metrics is not None else Metrics()
        self.feed = Feed(ledger)
        self.dispatch = Dispatch(ledger, self.feed, self.metrics)
        self._ledger = ledger
        self._traces = traces
        self._retention = retention or RetentionConfig()
        self._fleet = Fleet(ledger, credentials.of_node)
        self._callbacks = Callbacks(
            ledger,
            self.feed,
            self.metrics,
            callbacks or CallbackConfig(),
            secret=callback_secret,
            loopback=loopback_only,
            allow_import=allow_import,
        )
        self._check = check
        self._allow_import = allow_import
        self.routes: list[Route] = [
            *TasksAPI(ledger, self.dispatch, self.feed, self._check_all, allow_import=allow_import).routes(),
            *ResultsAPI(ledger, self.feed, allow_import=allow_import).routes(),
            *NodesAPI(ledger, self.dispatch).routes(),
            *SessionsAPI(ledger, capture or self._fleet, self.feed.poke, allow_import=allow_import).routes(),
            *InferenceAPI(inference or self._fleet).routes(),
            *AuditAPI(ledger).routes(),
            *WatchAPI(ledger, self.feed, self.metrics, lambda: openapi(self.routes)).routes(),
        ]
        self.app: App = app(self.routes, credentials, Audit(ledger), self.metrics.guesses, OwnNames(urls))
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Go on with what was due."""
        await self.feed.start()
        counted = await self._ledger.newest_result()
        await self._callbacks.start()
        self._loops = [
            asyncio.create_task(forever(self.dispatch.expire, "leases can't be taken back", every=EXPIRE_EVERY)),
            asyncio.create_task(follow_results(self._ledger, self.feed, counted, self.metrics.session_ended)),
            asyncio.create_task(forever(self._purge, "retention", every=PURGE_EVERY)),
            asyncio.create_task(
                forever(self._fleet.forget_what_is_left, "what nodes have to forget", every=FORGET_EVERY)
            ),
            asyncio.create_task(
                forever(partial(end_orphans, self._ledger), "bare sessions of lost nodes", every=ORPHANS_EVERY)
            ),
        ]
        if self._traces is not None:
            self._loops.append(asyncio.create_task(self._traces.follow(self._ledger, self.feed, self.feed.last)))

    async def close(self) -> None:
        """Let everybody go who waits, and stop."""
        for loop in self._loops:
            loop.cancel()
        if self._loops:
            await asyncio.wait(self._loops)
        await self.feed.close()
        await self._callbacks.close()
        await self._fleet.aclose()
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def _check_all(self, task: TaskRequest) -> None:
        check_task(task, allow_import=self._allow_import)
        if self._check is not None:
            self._check(task)
        if task.runtime.backend == "local":  # the sessions of others end as ERROR that says so
            refuse_unsupported(task.runtime)
        if task.callback_url is not None:
            self._callbacks.hosts.check_url(task.callback_url)

    async def _purge(self) -> None:
        if self._retention.days is None:
            return
        purged = await self._ledger.purge(time.time() - self._retention.days * 86400)
        if purged.sessions:
            log.info("retention: %d tasks, %d sessions, %d calls are gone", *purged)
