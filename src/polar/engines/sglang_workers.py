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
        self._routers: list[str] = []
        self._refused: set[str] = set()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the servers and start with them.

        Raises:
            UsageError: nothing answers, a router has no worker, or the servers are not of one kind.
        """
        found = [await workers_behind(url, api_key=self._api_key) for url in self._urls]
        self._routers = [url for url, workers in zip(self._urls, found, strict=True) if workers != [_server(url)]]
        self.hold([self._make(worker) for worker in dict.fromkeys(chain.from_iterable(found))])
        await super().start()
        if self._routers:
            self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """End every call on every server."""
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        await super().close()

    async def _follow(self) -> None:
        """Take in the servers that routers have got since, and let go of those that are out and theirs no more."""
        while True:
            await asyncio.sleep(self._probe_seconds)
            try:
                behind = [await workers_behind(router, api_key=self._api_key) for router in self._routers]
            except UsageError:
                continue  # it is away, or none of its servers is well: those we know are looked after as ever
            listed = [*chain.from_iterable(behind), *(_server(url) for url in self._urls if url not in self._routers)]
            for worker in set(listed).difference(load.url for load in self.load()):
                await self._take_in(worker)
            await self.let_go(listed)

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


def _server(url: str) -> str:
    """The address of a server, as ``workers_behind`` writes it."""
    return Upstream(url).url
