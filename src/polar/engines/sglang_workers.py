"""Why: SGLang's router strips the ids that a trainer needs, and spreads a session over servers whose caches don't
know it. So a router is only asked who is behind it, again and again, and the servers themselves are called.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain

from polar.contract.errors import UsageError
from polar.engines.http import Upstream
from polar.engines.pool import ServerPool
from polar.engines.sglang import SGLangEngine
from polar.engines.sglang_server import workers_behind

log = logging.getLogger("polar.engines")


class SGLangWorkers(ServerPool[SGLangEngine]):
    """The SGLang servers at some URLs, or behind them where they are routers: those of the start, and those that a
    router gets later.

    Args:
        make: an engine for the server at a URL.
    """

    def __init__(self, urls: Sequence[str], make: Callable[[str], SGLangEngine], *, api_key: str | None) -> None:
        super().__init__([])
        self._urls = urls
        self._make = make
        self._api_key = api_key
        self._behind: dict[str, list[str]] = {}
        """The servers that each router named last."""
        self._coming: dict[str, asyncio.Task[None]] = {}
        """Servers that a router has got since, and that are being started."""
        self._refused: set[str] = set()
        self._following: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find the servers and start with them.

        Raises:
            UsageError: nothing answers, a router has no worker, or the servers are not of one kind.
        """
        found = {url: await workers_behind(url, api_key=self._api_key) for url in self._urls}
        self._behind = {url: workers for url, workers in found.items() if workers != [_server(url)]}
        self.hold([self._make(worker) for worker in dict.fromkeys(chain.from_iterable(found.values()))])
        await super().start()
        self._following = [asyncio.create_task(self._follow(router)) for router in self._behind]

    async def close(self) -> None:
        """End every call on every server."""
        tasks = [*self._following, *self._coming.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _follow(self, router: str) -> None:
        """Take in the servers that a router has got since, and let go of those that are out and no router's more."""
        while True:
            await asyncio.sleep(self._probe_seconds)
            with suppress(UsageError):  # it is away, or none of its servers is well: those we know are looked after
                self._behind[router] = await workers_behind(router, api_key=self._api_key)
            known = {load.url for load in self.load()}.union(self._coming)
            for worker in set(self._behind[router]).difference(known):
                self._coming[worker] = asyncio.create_task(self._take_in(worker))
            own = (_server(url) for url in self._urls if url not in self._behind)
            await self.let_go([*chain.from_iterable(self._behind.values()), *own])

    async def _take_in(self, worker: str) -> None:
        engine = self._make(worker)
        try:
            await engine.start()
            await self.join(engine)
        except UsageError as error:
            await engine.close()
            if worker not in self._refused:
                log.warning("a router names engine %s, which is left out: %s", worker, error)
            self._refused.add(worker)
        else:
            self._refused.discard(worker)
        finally:
            self._coming.pop(worker, None)


def _server(url: str) -> str:
    """The address of a server, as ``workers_behind`` writes it."""
    return Upstream(url).url
