"""Nodes over HTTP: what an operator sees of them, and the routes under which they work, for which only the node
credential is good."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from polar.contract.errors import UsageError
from polar.contract.rollout import (
    LARGEST_DELIVERY,
    Claim,
    Delivery,
    Heartbeat,
    HeartbeatReply,
    Lease,
    NodeInfo,
    NodeSpec,
    Release,
)
from polar.contract.task import ID_PATTERN
from polar.rollout.dispatch import Dispatch
from polar.rollout.http import Call, NotYours, Query, Route, reply
from polar.rollout.views import whole_nodes
from polar.store.ledger import Ledger


class NodesAPI:
    """The routes of nodes."""

    def __init__(self, ledger: Ledger, dispatch: Dispatch) -> None:
        self._ledger = ledger
        self._dispatch = dispatch

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        one = "/nodes/{node_id}"
        return [
            Route("GET", "/nodes", "node.list", "read", self.list, "All nodes.", answer=list[NodeInfo]),
            Route("GET", one, "node.read", "read", self.read, "A node.", answer=NodeInfo),
            Route(
                "DELETE", one, "node.drain", "admin", self.drain, "A node shall take no more sessions.",
                answer=NodeInfo, audited=lambda _: True,
            ),
            Route(
                "POST", "/nodes/register", "node.register", "node", self.register, "A node is here (again).",
                body=NodeSpec, answer=NodeInfo,
            ),
            Route(
                "POST", one + "/heartbeat", "node.heartbeat", "node", self.heartbeat, "A node lives.",
                body=Heartbeat, answer=HeartbeatReply,
            ),
            Route(
                "POST", one + "/claim", "node.claim", "node", self.claim, "Sessions to run, each under a lease.",
                body=Claim, answer=list[Lease],
            ),
            Route(
                "POST", one + "/deliveries", "node.deliver", "node", self.deliver,
                "Captured calls and a result, from the node's journal.", body=Delivery, statuses=(409,),
                largest=LARGEST_DELIVERY,
            ),
            Route(
                "POST", one + "/release", "node.release", "node", self.release, "Hand a session back, unfinished.",
                body=Release, answer=dict[str, Any],
            ),
        ]  # fmt: skip

    async def list(self, call: Call) -> Response:
        return reply(whole_nodes(await self._ledger.nodes(time.time())))

    async def read(self, call: Call) -> Response:
        return reply(await self._one(call.id("node_id")))

    async def drain(self, call: Call) -> Response:
        """All of its workers, if it has several."""
        name = call.id("node_id")
        workers = [node.node_id for node in await self._ledger.nodes(time.time()) if node.worker_of == name]
        for worker in workers or [name]:
            await self._dispatch.drain(worker)
        return reply(await self._one(name))

    async def _one(self, name: str) -> NodeInfo:
        for node in whole_nodes(await self._ledger.nodes(time.time())):
            if node.node_id == name:
                return node
        return await self._dispatch.node(name)  # one worker, or none

    async def register(self, call: Call) -> Response:
        spec: NodeSpec = call.body
        Query("node_id", "", pattern=ID_PATTERN).read(spec.node_id)
        if min(spec.max_init_workers, spec.max_run_workers, spec.max_postrun_workers) < 1 or spec.max_ready < 0:
            raise UsageError("a node has one worker or more for each stage")
        if not spec.gateway_url.startswith(("http://", "https://")):
            raise UsageError("gateway_url must be http://HOST:PORT or https://HOST:PORT")
        for name in (spec.node_id, spec.worker_of or spec.node_id):  # who names a node hides it in the list of nodes
            if (why := call.actor.not_for(name)) is not None:
                raise NotYours(why)
        return reply(await self._dispatch.register(msgspec.structs.replace(spec, credential=call.actor.name)))

    async def heartbeat(self, call: Call) -> Response:
        return reply(await self._dispatch.heartbeat(call.id("node_id"), call.body))

    async def claim(self, call: Call) -> Response:
        work = self._dispatch.claim(call.id("node_id"), call.body)
        return reply(await call.while_connected(work))

    async def deliver(self, call: Call) -> Response:
        await self._dispatch.deliver(call.id("node_id"), call.body)
        return reply({"kept": True})

    async def release(self, call: Call) -> Response:
        await self._dispatch.release(call.id("node_id"), call.body)
        return reply({"released": True})
