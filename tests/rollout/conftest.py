"""A rollout server in this process: the real SQLite ledger, real HTTP, and clients with each kind of credential."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from polar.contract.arrays import to_json
from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.contract.rollout import Delivery
from polar.gateway.server import GatewayServer
from polar.rollout.auth import Credentials
from polar.rollout.server import RolloutServer
from polar.store import SQLiteStore
from polar.store.ledger import Ledger
from tests.rollout.making import TOKENS, completion, result, token_of


@dataclass
class World:
    """A running server, and who calls it."""

    server: RolloutServer
    ledger: Ledger
    url: str
    stack: AsyncExitStack
    clients: dict[str, httpx.AsyncClient] = field(default_factory=dict)

    def as_(self, role: str) -> httpx.AsyncClient:
        """A client with a token of this role, or of this name if it is bound to nodes (``nobody``: with none)."""
        if role not in self.clients:
            headers = {} if role == "nobody" else {"Authorization": f"Bearer {token_of(role)}"}
            client = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=30, trust_env=False)
            self.clients[role] = client
            self.stack.push_async_callback(client.aclose)
        return self.clients[role]

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.as_("admin")

    async def get(self, path: str, **params: Any) -> Any:
        answer = await self.admin.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def node(self, path: str, body: Any) -> Any:
        """Post to a route of nodes; the decoded answer."""
        answer = await self.as_("node").post(path, content=to_json(body))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def join(self, node_id: str = "n1", **fields: Any) -> None:
        """A node registers."""
        spec = {"node_id": node_id, "gateway_url": "http://127.0.0.1:1", "instance": "a"}
        workers = {f"max_{stage}_workers": 4 for stage in ("init", "run", "postrun")}
        await self.node("/nodes/register", {**spec, **workers, **fields})

    async def submit(self, body: dict[str, Any]) -> None:
        answer = await self.as_("submit").post("/rollout/task/submit", json=body)
        assert answer.status_code == 200, answer.text

    async def claim(self, node_id: str = "n1", room: int = 10, **fields: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await self.node(f"/nodes/{node_id}/claim", {"room": room, **fields})
        return found

    async def finish(self, lease: dict[str, Any], *, node_id: str = "n1", calls: int = 2, **fields: Any) -> None:
        """A node hands over a session's calls, then its result."""
        of = {"session_id": lease["session_id"], "attempt": lease["attempt"]}
        made: list[Completion] = [completion(seq=seq, **of) for seq in range(calls)]
        told: SessionResult = result(task_id=lease["task_id"], **of, **fields)
        await self.node(f"/nodes/{node_id}/deliveries", Delivery(**of, completions=made))
        await self.node(f"/nodes/{node_id}/deliveries", Delivery(**of, result=told))

    async def run(self, body: dict[str, Any], **fields: Any) -> None:
        """Submit a task, and have a node run all of it."""
        await self.submit(body)
        for lease in await self.claim():
            await self.finish(lease, **fields)


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world(tmp_path: Path) -> AsyncIterator[MakeWorld]:
    """``make_world(**options)``: a server, with further node tokens of the names and for the nodes in ``bound``; with
    ``ledger=`` of an earlier world, a second one over the same."""
    async with AsyncExitStack() as stack:

        async def make(
            *, ledger: Ledger | None = None, anonymous: Any = None, bound: Any = MappingProxyType({}), **options: Any
        ) -> World:
            known = TOKENS | {name: token_of(name) for name in bound}
            if ledger is None:
                ledger = SQLiteStore(tmp_path / "polar.db")
                await ledger.open()
                stack.push_async_callback(ledger.close)
            tokens = [(name, name if name in TOKENS else "node", token) for name, token in known.items()]
            credentials = Credentials(tokens, anonymous=anonymous, bound=bound)  # type: ignore[arg-type]
            server = RolloutServer(ledger, credentials, callback_secret="a secret of callbacks", **options)
            await server.start()
            stack.push_async_callback(server.close)
            http = GatewayServer(server.app)
            await http.start()
            stack.push_async_callback(http.close)
            return World(server, ledger, http.url, stack)

        yield make


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    return await make_world()
