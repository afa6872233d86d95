"""A gateway node: one engine, one store, the proxy between them, and the means to run sessions.

A node is the same thing in ``polar demo``, ``polar run`` and ``polar capture``.
"""

from __future__ import annotations

from pathlib import Path

from polar.engines.base import Engine
from polar.gateway.app import Gateway, Limits
from polar.gateway.choosing import choose_backend
from polar.gateway.pipeline import Pipeline
from polar.gateway.server import GatewayServer
from polar.gateway.session import LiveSession
from polar.redaction import Redaction
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
        node_id: its name, in every result.
        require_token_ids: a reply without token ids ends its session; if not, it only is not trained.
        buffer_replies: streams are sampled whole first, and sent in one go at the end.
        redaction: takes text out of what is stored.
        limits: of what one session may send.
        worker: which of several gateway workers behind one port this is.
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
        require_token_ids: bool = True,
        node_id: str = "local",
        buffer_replies: bool = False,
        redaction: Redaction | None = None,
        limits: Limits | None = None,
        worker: int | None = None,
    ) -> None:
        self.engine = engine
        self.store = store
        self.folder = folder
        self.require_token_ids = require_token_ids
        self.node_id = node_id
        self.worker = worker
        self._renderer = renderer
        self._buffer_replies = buffer_replies
        self.redaction = redaction
        self._limits = limits or Limits()
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
            pipeline = Pipeline(choose_backend(self.engine, self._renderer), self.store, self.redaction)
            self.gateway = Gateway(pipeline, buffer=self._buffer_replies, limits=self._limits)
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

    def kept_error(self, error: str) -> str:
        """An error, as far as it may be kept: what an agent said last may be in it."""
        return error if self.redaction is None else self.redaction.error(error)

    def why_no_call(self, session: LiveSession, who: str) -> str:
        """Why a session has recorded nothing: ``who``, which should have called, did not, or was refused."""
        if session.refusals == 0:
            return f"no model call: {who} never reached the model"
        many = "its only call was refused"
        if session.refusals > 1:
            many = f"all {session.refusals} calls were refused, the last one"
        return f"no model call: {many}: {self.kept_error(session.refusal)}"

    @property
    def context_length(self) -> int:
        """What harnesses are told: the engine's context, or an assumption where it does not say."""
        return self.engine.info.context_length or ASSUMED_CONTEXT
