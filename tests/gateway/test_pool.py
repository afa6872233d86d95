"""A gateway before several servers: sessions stay exact when one of them goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry

from polar.contract.chat import Sampling
from polar.contract.completion import Completion
from polar.engines import make_engine
from polar.gateway.metrics import NodeCollector
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.store import open_store
from polar.store.base import SessionRecord
from tests.support.script import Conversation, Script, Step
from tests.support.scripted import RunningEngine, scripted_engine


def step(conversation: Conversation) -> Step:
    held = 1 if conversation.last == "wait" else None
    return Step(text=f"answer {conversation.turn}", hold_after=held)


@dataclass
class Servers:
    """A node before two servers, each of which can be taken away."""

    node: Node
    running: list[RunningEngine]
    stacks: list[AsyncExitStack]

    async def session(self, name: str) -> LiveSession:
        await self.node.store.put_session(
            SessionRecord(
                session_id=name, task_id="t", sample_index=0, state="RUNNING", created_at=0.0, updated_at=0.0
            )
        )
        session = LiveSession(session_id=name, pins=Sampling(temperature=1.0))
        self.node.gateway.open(session)
        return session

    def asked(self) -> list[int]:
        return [len(running.model.log.generations) for running in self.running]

    async def completions(self, session: LiveSession) -> list[Completion]:
        for call in list(session.calls):
            await call.settled()
        return await self.node.store.completions(session.session_id)


@pytest.fixture(params=["vllm", "openai"])
async def servers(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Servers]:
    stacks = [AsyncExitStack(), AsyncExitStack()]
    running = [await stack.enter_async_context(scripted_engine(tiny_model, Script(choose=step))) for stack in stacks]
    engine = make_engine(request.param, url=", ".join(each.url for each in running), max_inflight=1)
    node = Node(engine, open_store(str(tmp_path / "polar.db")), tmp_path)
    await node.start()
    node.gateway._grace = 0.01
    yield Servers(node, running, stacks)
    await node.close()
    for stack in stacks:
        await stack.aclose()


async def talk(servers: Servers, session: LiveSession, turns: int, messages: list[Any]) -> list[Any]:
    """More turns of a conversation; all of its messages."""
    async with AsyncOpenAI(base_url=f"{servers.node.server.url}/v1", api_key=session.key, max_retries=0) as client:
        for turn in range(turns):
            messages = [*messages, {"role": "user", "content": f"turn {turn}"}]
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages


async def test_each_session_has_its_server(servers: Servers) -> None:
    one, two = await servers.session("one"), await servers.session("two")
    await talk(servers, one, 3, [])
    await talk(servers, two, 2, [])
    assert servers.asked() == [3, 2]


async def test_a_server_that_goes_away_between_two_turns_costs_nothing(servers: Servers) -> None:
    session = await servers.session("one")
    messages = await talk(servers, session, 2, [])
    await servers.stacks[0].aclose()
    messages = await talk(servers, session, 2, messages)
    assert [m["content"] for m in messages if m["role"] == "assistant"] == [f"answer {turn}" for turn in range(4)]
    assert servers.asked() == [2, 2]
    completions = await servers.completions(session)
    assert {completion.outcome for completion in completions} == {"ok"}
    for before, after in pairwise(completions):
        assert (after.parent_id, after.split) == (before.completion_id, None)
    generations = [generation for each in servers.running for generation in each.model.log.generations]
    prompts = [session.graph.prompt_ids(completion).tolist() for completion in completions]
    assert prompts == [generation.context_ids for generation in generations]


async def test_a_client_that_goes_away_ends_the_generation_at_its_server(servers: Servers) -> None:
    """C6."""
    session = await servers.session("one")
    async with AsyncOpenAI(base_url=f"{servers.node.server.url}/v1", api_key=session.key) as client:
        asking = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "wait"}])
        )
        log = servers.running[0].model.log
        await log.wait_for(lambda found: bool(found) and len(found[0].sampled_ids) == 1)
        asking.cancel()
        await log.wait_for(lambda found: found[0].ended == "cancelled")
    [completion] = await servers.completions(session)
    assert completion.outcome == "abandoned"


async def test_the_metrics_say_how_full_each_server_is(servers: Servers) -> None:
    """Two calls of a session at a server that takes one at a time."""
    numbers = CollectorRegistry()
    numbers.register(NodeCollector(servers.node))

    def read(name: str) -> list[float | None]:
        return [numbers.get_sample_value(f"polar_engine_{name}", {"url": each.url}) for each in servers.running]

    session = await servers.session("one")
    async with AsyncOpenAI(base_url=f"{servers.node.server.url}/v1", api_key=session.key, max_retries=0) as client:

        async def ask(system: str) -> None:
            messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "wait"}]
            await client.chat.completions.create(model="m", messages=messages)

        asking = [asyncio.create_task(ask(system)) for system in ("a", "b")]
        async with asyncio.timeout(10):
            while read("waiting") != [1, 0]:
                await asyncio.sleep(0.01)
        assert (read("inflight"), read("sessions"), read("healthy")) == ([2, 0], [1, 0], [1, 1])
        servers.running[0].model.release()
        await asyncio.gather(*asking)
    assert (read("inflight"), read("waiting")) == ([0, 0], [0, 0])
