"""``polar serve``: the rollout server, a gateway node, or both in one process, put together from settings.

Both planes are on one port. What runs in a sandbox reaches the data plane only, on a listener of its own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

import polar
from polar.background import forever
from polar.client import token_file
from polar.contract.errors import PolarError, UsageError
from polar.contract.rollout import NodeSpec
from polar.contract.task import TaskRequest
from polar.engines import DEFAULT_MODEL, make_engine
from polar.engines.base import Engine
from polar.engines.pool import pool_of
from polar.gateway.app import Limits
from polar.gateway.captures import Captures
from polar.gateway.coordinator import Coordinator, HttpCoordinator, LocalCoordinator
from polar.gateway.folders import forget_folders
from polar.gateway.lifecycle import Stages
from polar.gateway.metrics import NodeCollector, StagesCollector
from polar.gateway.node import Node
from polar.gateway.server import GatewayServer, require_free
from polar.gateway.session_run import Parts
from polar.gateway.siblings import Place, Siblings
from polar.gateway.tasks import make_parts
from polar.gateway.worker import Worker
from polar.harnesses import by_name, names
from polar.redaction import load_redaction
from polar.results import DATABASE
from polar.rollout.app import App, one_port
from polar.rollout.auth import (
    CALLBACK_ENV,
    NODE_ENV,
    Credentials,
    kept_secret,
    load_credentials,
    node_credentials,
)
from polar.rollout.hosting import HostedCaptures, LocalInference
from polar.rollout.metrics import Metrics
from polar.rollout.node_app import node_app
from polar.rollout.server import PURGE_EVERY, RolloutServer
from polar.rollout.tracing import session_traces
from polar.runtimes import remove_leftovers
from polar.settings import ServeConfig, check_allowed, is_loopback
from polar.store import Journal, Ledger, SQLiteJournal, Store, open_store

log = logging.getLogger("polar.serve")

JOURNAL = "journal.db"
JOURNAL_DAYS = 1.0
"""For how long a node keeps what it has handed over, where ``retention`` says nothing; what was set aside
stays then."""
Say = Callable[[str], None]


class Service:
    """A running service.

    Args:
        environ: where tokens and secrets are looked for.
        say: told, in one line each, what a person must know: addresses, where tokens are.
        place: of this worker, where several gateways share a port.
    """

    def __init__(
        self,
        config: ServeConfig,
        environ: dict[str, str],
        say: Say = lambda _: None,
        *,
        place: Place | None = None,
    ) -> None:
        self.config = config
        self._place = place
        self.url = ""
        self.registry = CollectorRegistry()
        """The numbers of all parts that this process has."""
        self.worker: Worker | None = None
        self._bare: Captures | None = None
        self._environ = environ
        self._say = say
        self._folder = Path(config.out)
        self._admin_file: Path | None = None
        self._stack = AsyncExitStack()
        self._work: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all parts of the role; what was started is closed again if a later part fails.

        Raises:
            UsageError: a part is not configured right; the message says which and what to do.
        """
        if self._place is None:
            require_free(self.config.host, self.config.port)  # first: a second start by mistake writes nothing
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self._folder} can't be made ({error.strerror}): take another --out") from None
        try:
            starts = {"all": self._start_all, "rollout": self._start_rollout, "gateway": self._start_gateway}
            await starts[self.config.role]()
        except BaseException:
            await self._stack.aclose()
            raise

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set; then the node drains.

        Raises:
            PolarError: a part can't go on.
        """
        stopping = asyncio.create_task(stop.wait())
        waiting = {stopping, *([self._work] if self._work else [])}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        if self._work is not None and self._work.done():
            await self._work
        if self.worker is not None:
            await self.worker.drain(self.config.limits.drain_seconds)
            if self._bare is not None:
                await self._bare.close_all()
            await self.worker.hand_over()

    async def close(self) -> None:
        """Stop everything, in the reverse order of its start."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        await self._stack.aclose()

    # ---- roles -------------------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        ledger = open_store(self.config.store or str(self._folder / DATABASE))
        node = await self._node(ledger)
        captures = await self._captures(node)
        server = await self._server(
            ledger,
            capture=HostedCaptures(captures, lambda: self.url, self._drains),
            inference=LocalInference(node.gateway.inference),
        )
        await self._listen(one_port(server.app, node.gateway))
        coordinator = LocalCoordinator(server.dispatch, self.config.name)
        self._begin(node, coordinator, on_change=server.feed.poke)

    async def _start_rollout(self) -> None:
        ledger = open_store(self.config.store or str(self._folder / DATABASE))
        await ledger.open()
        self._stack.push_async_callback(ledger.close)
        server = await self._server(ledger)
        await self._listen(server.app)

    async def _start_gateway(self) -> None:
        token = self._environ.get(NODE_ENV)
        if not token or self.config.server is None:
            raise UsageError(f"set {NODE_ENV} to the node token of the rollout server ({self.config.server})")
        coordinator = HttpCoordinator(self.config.server, self.config.name, token)
        self._stack.push_async_callback(coordinator.close)
        await coordinator.check_token()  # before a model is loaded in vain
        journal = SQLiteJournal(self._folder / JOURNAL)
        node = await self._node(journal)
        captures = await self._captures(node)
        own = node_app(
            HostedCaptures(captures, lambda: self.url, self._drains),
            LocalInference(node.gateway.inference),
            self.registry,
            node_credentials(self.config.auth, token, self._environ),
            node_id=self.config.name,
            server=self.config.server.rstrip("/"),
        )
        await self._listen(one_port(own, node.gateway))
        self._begin(node, coordinator, journal=journal)
        tidying = asyncio.create_task(
            forever(lambda: self._tidy(journal, captures), "the journal can't be tidied", every=PURGE_EVERY)
        )
        self._stack.callback(tidying.cancel)

    # ---- parts -------------------------------------------------------------------------------------------

    async def _node(self, store: Store) -> Node:
        engines = [self._engine(index) for index in range(len(self.config.engines))]
        node = Node(
            engines[0] if len(engines) == 1 else pool_of(engines),
            store,
            self._folder,
            node_id=self.config.name,
            require_token_ids=self.config.require_token_ids,
            buffer_replies=self.config.buffer_replies,
            worker=self._place.index if self._place else None,
            redaction=load_redaction(self.config.redaction),
            limits=Limits(body=self.config.limits.body_mb * 1024 * 1024, calls=self.config.limits.calls_per_session),
        )
        await node.start()
        self._stack.push_async_callback(node.close)
        self.registry.register(NodeCollector(node))
        await asyncio.to_thread(remove_leftovers, self._folder)
        return node

    def _engine(self, index: int) -> Engine:
        chosen = self.config.engines[index]
        if chosen.kind == "local":
            self._say(f"loading {chosen.model or DEFAULT_MODEL} ...")
        return make_engine(
            chosen.kind,
            url=chosen.url,
            model=chosen.model,
            mode=chosen.mode,
            tokenizer=chosen.tokenizer,
            max_inflight=chosen.max_inflight,
            require_token_ids=self.config.require_token_ids,
            progress=self._say,
        )

    async def _captures(self, node: Node) -> Captures:
        captures = Captures(node, idle_seconds=self.config.limits.idle_session_seconds)
        await captures.end_those_cut_off()
        self._stack.push_async_callback(captures.close_all)
        self._bare = captures
        watching = asyncio.create_task(captures.watch())
        self._stack.callback(watching.cancel)
        return captures

    def _drains(self) -> str | None:
        """Why no bare session is opened here, and what to do, if that is so."""
        if self.worker is None or not self.worker.draining:
            return None
        elsewhere = f"the rollout server ({self.config.server})" if self.config.server else "another server"
        return f"node {self.config.name} drains, and opens no session: ask {elsewhere}, or start this one again"

    async def _tidy(self, journal: Journal, captures: Captures) -> None:
        """Forget what the server has for long; the disk of a node is not a second ledger."""
        days = self.config.retention.days
        held = captures.names | {each.session_id for each in (self.worker.held if self.worker else ())}
        before = time.time() - (JOURNAL_DAYS if days is None else days) * 86400
        purged = await journal.forget_handed_over(before, held, aside=days is not None)
        if purged.sessions:
            log.info("journal: %d tasks, %d sessions, %d calls that the server has are gone", *purged)

    async def _server(
        self, ledger: Ledger, *, capture: HostedCaptures | None = None, inference: LocalInference | None = None
    ) -> RolloutServer:
        server = RolloutServer(
            ledger,
            self._credentials(),
            callback_secret=self._environ.get(CALLBACK_ENV) or kept_secret(self._folder / "callback.secret"),
            callbacks=self.config.callbacks,
            retention=self.config.retention,
            capture=capture,
            inference=inference,
            metrics=Metrics(self.registry),
            traces=session_traces(self._environ),
            check=lambda task: check_allowed(self.config, task),
            allow_import=bool(self.config.harnesses.allow_import),
            loopback_only=is_loopback(self.config.host),
            urls=[f"http://{self.config.host}", *([self.config.public_url] if self.config.public_url else [])],
        )
        await server.start()
        self._stack.push_async_callback(server.close)
        return server

    def _credentials(self) -> Credentials:
        credentials, files = load_credentials(self.config.auth, self._folder, self._environ)
        for file in files:
            self._say(f"{file.stem} token: {file}")
        self._admin_file = next((file for file in files if file.stem == "admin"), None)
        return credentials

    async def _listen(self, app: App) -> None:
        tls = self.config.tls.context() if self.config.tls else None
        if self._place is not None:
            await self._listen_among_siblings(app, self._place, tls)
            return
        server = GatewayServer(app, host=self.config.host, port=self.config.port, tls=tls)
        await server.start()
        self._stack.push_async_callback(server.close)
        self.url = (self.config.public_url or server.url).rstrip("/")
        self._say(f"serving at {server.url}")
        if self._admin_file is not None:
            kept = token_file(server.url)
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            kept.unlink(missing_ok=True)
            kept.symlink_to(self._admin_file.resolve())

    async def _listen_among_siblings(self, app: App, place: Place, tls: ssl.SSLContext | None) -> None:
        siblings = Siblings(app, place)
        self._stack.push_async_callback(siblings.close)
        for each, listener, context in ((siblings, place.shared, tls), (app, place.own, None)):
            server = GatewayServer(each)
            await server.serve(listener, tls=context)
            self._stack.push_async_callback(server.close)
        self.url = (self.config.public_url or place.url).rstrip("/")

    def _begin(
        self,
        node: Node,
        coordinator: Coordinator,
        *,
        journal: Journal | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        pools = self.config.pools
        spec = NodeSpec(
            node_id=self.config.name,
            gateway_url=self._place.url_for(self.url) if self._place else self.url,
            instance=secrets.token_hex(8),
            max_init_workers=pools.init,
            max_run_workers=pools.run,
            max_postrun_workers=pools.post_run,
            max_ready=pools.ready,
            worker_of=self.config.name.removesuffix(f"-{self._place.index}") if self._place else "",
            version=polar.__version__,
            harnesses=_installed(),
            engines=[
                {"kind": each.kind, "url": each.url, "model": node.engine.info.model} for each in self.config.engines
            ],
        )
        stages = Stages(pools)
        self.registry.register(StagesCollector(stages))
        self.worker = Worker(
            node, coordinator, spec, stages, self._parts(), journal=journal, on_change=lambda _: on_change()
        )
        self._work = asyncio.create_task(self.worker.work())
        if self.config.retention.days is not None:
            forgetting = partial(self._forget_folders, self.worker, self.config.retention.days)
            tidying = asyncio.create_task(forever(forgetting, "old sessions' folders", every=PURGE_EVERY))
            self._stack.callback(tidying.cancel)

    async def _forget_folders(self, worker: Worker, days: float) -> None:
        held = {each.session_id for each in worker.held}
        await asyncio.to_thread(forget_folders, self._folder / "sessions", time.time() - days * 86400, held)

    def _parts(self) -> Callable[[TaskRequest], Awaitable[Parts]]:
        async def make(task: TaskRequest) -> Parts:
            check_allowed(self.config, task)
            return await make_parts(
                task,
                sandbox=self.config.runtimes.sandbox,
                allow_import=bool(self.config.harnesses.allow_import),
            )

        return make


def _installed() -> dict[str, str]:
    found = {name: by_name(name).find() for name in names()}
    return {name: installed.version or "" for name, installed in found.items() if installed is not None}


async def serve(
    config: ServeConfig, environ: dict[str, str], stop: asyncio.Event, say: Say, *, place: Place | None = None
) -> None:
    """A service from its start to its end.

    Raises:
        PolarError: it can't start, or can't go on.
    """
    service = Service(config, environ, say, place=place)
    if not await _started(service, stop):
        return
    try:
        await service.run(stop)
    except PolarError:
        log.error("stopping")
        raise
    finally:
        await service.close()


async def _started(service: Service, stop: asyncio.Event) -> bool:
    """Start it; whether it was not told to stop before it had started."""
    starting, stopping = asyncio.create_task(service.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.wait({starting})
    if starting.cancelled():
        return False
    await starting
    return True


async def serve_until_told(
    config: ServeConfig,
    environ: dict[str, str],
    say: Say,
    *,
    signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
    place: Place | None = None,
) -> None:
    """``serve``, until one of the signals comes; then it drains.

    Raises:
        PolarError: as ``serve``.
        CancelledError: a second signal came, and all was ended at once.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    me = asyncio.current_task()

    def told() -> None:
        if stop.is_set() and me is not None:
            me.cancel()
        say("draining; once more to end at once")
        stop.set()

    for number in signals:
        loop.add_signal_handler(number, told)
    await serve(config, environ, stop, say, place=place)
