"""A gateway in this process with real rendering, a real store, real HTTP and a scripted model behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.contract.completion import Completion
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SGLangEngine
from polar.engines.vllm import VLLMEngine
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.store import open_store
from polar.store.base import SessionRecord
from tests.support.model import ScriptedModel
from tests.support.script import Script, Step
from tests.support.scripted import ScriptedServer, scripted_engine
from tests.support.scripted_sglang import scripted_sglang
from tests.support.tinymodel import make_tiny_model
from tests.support.tokens import ScriptedTokenEngine

WIRES: dict[str, tuple[Any, type[OpenAIEngine]]] = {
    "vllm": (scripted_engine, VLLMEngine),
    "sglang": (scripted_sglang, SGLangEngine),
    "chat": (scripted_engine, OpenAIEngine),
}
"""Servers by mode, and what calls them."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass
class World:
    """A running node, one open session, and what the engine knows."""

    node: Node
    model: ScriptedModel
    session: LiveSession
    folder: Path
    engine: ScriptedServer | None = None
    """The engine's HTTP side, in chat mode."""

    def client(self, **options: object) -> AsyncOpenAI:
        options = {"max_retries": 0, "api_key": self.session.key, **options}
        return AsyncOpenAI(base_url=f"{self.node.server.url}/v1", **options)  # type: ignore[arg-type]

    async def completions(self) -> list[Completion]:
        return await self.node.store.completions(self.session.session_id)

    def prompt(self, completion: Completion) -> list[int]:
        ids: Ids = self.session.graph.prompt_ids(completion)
        return ids.tolist()

    async def recorded(self, count: int) -> list[Completion]:
        """The completions once there are ``count`` of them and no call is in flight."""
        for call in list(self.session.calls):
            await call.settled()
        found = await self.completions()
        assert len(found) == count, found
        return found


MakeWorld = Callable[..., "AsyncIterator[World]"]


@pytest.fixture
async def make_world(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as stack:

        async def make(
            steps: list[Step] | Callable[..., Step],
            *,
            mode: str = "tito",
            pins: Sampling | None = None,
            grace: float = 2.0,
            max_model_len: int = 32768,
            model_dir: Path | None = None,
            require_token_ids: bool = True,
            buffer_replies: bool = False,
        ) -> World:
            """A world in one of four modes. ``tito``: token ids in and out, the engine in this process; ``vllm`` and
            ``sglang``: the same over their wires; ``chat``: the engine renders and parses, over vLLM's wire."""
            script = Script(choose=steps) if callable(steps) else Script(steps)
            server: ScriptedServer | None = None
            if mode == "tito":
                model = ScriptedModel(model_dir or tiny_model, script, max_model_len=max_model_len)
                engine: object = ScriptedTokenEngine(model)
            else:
                serve, kind = WIRES[mode]
                running = await stack.enter_async_context(
                    serve(model_dir or tiny_model, script, max_model_len=max_model_len)
                )
                server = running.server
                model, engine = running.model, kind(running.url, require_token_ids=require_token_ids)
            store = open_store(str(tmp_path / "polar.db"))
            options = {"require_token_ids": require_token_ids, "buffer_replies": buffer_replies}
            node = Node(engine, store, tmp_path, **options)  # type: ignore[arg-type]
            await node.start()
            stack.push_async_callback(node.close)
            node.gateway._grace = grace
            record = SessionRecord(
                session_id="s", task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
            )
            await node.store.put_session(record)
            session = LiveSession(session_id="s", pins=pins or Sampling(), require_token_ids=require_token_ids)
            node.gateway.open(session)
            return World(node, model, session, tmp_path, server)

        yield make
