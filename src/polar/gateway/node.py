"""A gateway node: one engine, one store, the proxy between them, and the means to run sessions.

A node is the same thing in ``polar demo``, ``polar run`` and ``polar capture``.
"""

from __future__ import annotations

from pathlib import Path

from polar.contract.errors import UsageError
from polar.engines.base import ChatEngine, Engine, TokenEngine
from polar.gateway.app import Gateway
from polar.gateway.backends import Backend, ChatBackend, TitoBackend
from polar.gateway.pipeline import Pipeline
from polar.gateway.server import GatewayServer
from polar.rendering import load_renderer
from polar.rendering.base import Renderer
from polar.store.base import Store

ASSUMED_CONTEXT = 32768
"""Tokens. Where it is too much the engine refuses the call, in words that make harnesses compact."""


class Node:
    """Engine, store and proxy, started and closed together.

    Args:
        engine: where tokens come from. A token engine is used token in, token out; a chat engine in chat mode.
        store: where everything is kept.
        folder: for the files of sessions (sandboxes, logs).
        renderer: for a token engine; loaded from the engine's model folder if it is not given.
        host, port: where the proxy listens; port 0 takes a free one.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        folder: Path,
        *,
        renderer: Renderer | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.engine = engine
        self.store = store
        self.folder = folder
        self._renderer = renderer
        self._address = (host, port)
        self.gateway: Gateway
        self.server: GatewayServer

    async def start(self) -> None:
        """Start the engine, open the store, listen. What was started is closed again if a later part fails. The
        engine is first, so that one which is not there leaves no file behind.

        Raises:
            UsageError: a part is not configured right; the message says which and what to do.
        """
        try:
            await self.engine.start()
            await self.store.open()
            self.gateway = Gateway(Pipeline(self._backend(), self.store))
            self.server = GatewayServer(self.gateway, host=self._address[0], port=self._address[1])
            await self.server.start()
        except BaseException:
            await self.engine.close()
            await self.store.close()
            raise

    async def close(self) -> None:
        """Stop taking calls, then let go of the engine, then of the store."""
        await self.server.close()
        await self.engine.close()
        await self.store.close()

    @property
    def context_length(self) -> int:
        """What harnesses are told: the engine's context, or an assumption where it does not say."""
        return self.engine.info.context_length or ASSUMED_CONTEXT

    def _backend(self) -> Backend:
        if isinstance(self.engine, TokenEngine):
            renderer = self._renderer
            if renderer is None:
                if self.engine.info.model_path is None:
                    raise UsageError("This engine names no model folder, so no tokenizer: use a model folder")
                renderer = load_renderer(Path(self.engine.info.model_path))
            return TitoBackend(self.engine, renderer)
        if isinstance(self.engine, ChatEngine):
            return ChatBackend(self.engine)
        raise UsageError(f"{type(self.engine).__name__} is neither a token engine nor a chat engine")
