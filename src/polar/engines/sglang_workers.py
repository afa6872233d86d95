"""Why: SGLang's router strips the ids that a trainer needs, and spreads a session over servers whose caches don't
know it. So a router is only asked who is behind it, and the servers themselves are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polar.engines.pool import ServerPool
from polar.engines.sglang import SGLangEngine
from polar.engines.sglang_server import workers_behind


class SGLangWorkers(ServerPool[SGLangEngine]):
    """The SGLang servers at some URLs, or behind them where they are routers: found at the start.

    Args:
        make: an engine for the server at a URL.
    """

    def __init__(self, urls: Sequence[str], make: Callable[[str], SGLangEngine], *, api_key: str | None) -> None:
        super().__init__([])
        self._urls = urls
        self._make = make
        self._api_key = api_key

    async def start(self) -> None:
        """Find the servers and start with them.

        Raises:
            UsageError: nothing answers, a router has no worker, or the servers are not of one kind.
        """
        found = [worker for url in self._urls for worker in await workers_behind(url, api_key=self._api_key)]
        self.hold([self._make(worker) for worker in dict.fromkeys(found)])
        await super().start()
