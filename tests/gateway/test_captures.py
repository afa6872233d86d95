"""Bare capture sessions where the store fails, an end is cut off, or another node is over the same store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from polar.contract.task import AgentSpec, TaskRequest
from polar.gateway.captures import CUT_OFF, Captures
from polar.gateway.node import Node
from polar.gateway.session import LiveSession
from polar.redaction import Redaction
from polar.store.base import StoreConflict, StoreFailure
from tests.gateway.conftest import World
from tests.support.script import Step


@pytest.fixture
async def node(make_world: Callable[..., Any]) -> Node:
    world: World = await make_world([Step(text="hi")])
    return world.node


class Failing:
    """``finish_session`` that fails so often, before or after the store has kept what it got."""

    def __init__(self, node: Node, *, times: int = 1, kept: bool = False) -> None:
        self.tries = 0
        self._finish, self._times, self._kept = node.store.finish_session, times, kept
        self.came = asyncio.Event()
        node.store.finish_session = self.finish  # type: ignore[method-assign]

    async def finish(self, *what: Any, **how: Any) -> None:
        self.tries += 1
        if self.tries > self._times:
            await self._finish(*what, **how)
            self.came.set()
            return
        if self._kept:
            await self._finish(*what, **how)
        raise StoreFailure("the database is away")


async def test_a_session_whose_end_could_not_be_kept_is_closed_again(node: Node) -> None:
    captures = Captures(node)
    session = await captures.open(session_id="c")
    Failing(node)
    with pytest.raises(StoreFailure):
        await captures.close("c")
    with pytest.raises(StoreConflict):
        await captures.open(session_id="c")
    again = await captures.close("c")
    assert again is not None
    assert (again.status, session.session_id) == ("COMPLETED", "c")
    assert await captures.close("c") is None


async def test_an_end_that_was_kept_though_its_writer_never_heard_of_it_is_the_end(node: Node) -> None:
    captures = Captures(node)
    await captures.open(session_id="c")
    Failing(node, kept=True)
    with pytest.raises(StoreFailure):
        await captures.close("c", error="first")
    again = await captures.close("c", error="second")
    assert again is not None
    assert again.error == "first"


async def test_idle_sessions_are_ended_though_the_first_try_failed(node: Node) -> None:
    captures = Captures(node, idle_seconds=0.01)
    await captures.open(session_id="c")
    failing = Failing(node)
    watching = asyncio.create_task(captures.watch())
    async with asyncio.timeout(20):
        await failing.came.wait()
    watching.cancel()
    record = await node.store.session("c")
    assert record is not None
    assert record.state == "COMPLETED"


async def test_one_that_can_not_be_ended_keeps_no_other_open(node: Node) -> None:
    captures = Captures(node)
    for name in ("a", "b"):
        await captures.open(session_id=name)
    Failing(node)
    await captures.close_all()
    states = {record.session_id: record.state for record in await node.store.sessions()}
    assert (states["a"], states["b"]) == ("RUNNING", "ERROR")


async def test_after_a_restart_a_node_ends_its_own_sessions_and_no_other_s(node: Node) -> None:
    before = Captures(node)
    await before.open(session_id="own")
    other = Node(node.engine, node.store, node.folder, node_id="other")
    other.gateway, other.server = node.gateway, node.server
    await Captures(other).open(session_id="other-s")
    await Captures(node).end_those_cut_off()
    own, others = await node.store.session("own"), await node.store.session("other-s")
    assert own is not None
    assert others is not None
    assert (own.state, own.error, others.state) == ("ERROR", CUT_OFF, "RUNNING")


async def test_a_session_is_forgotten_with_all_that_it_captured(node: Node) -> None:
    captures = Captures(node)
    session = await captures.open(session_id="c")
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {session.key}"}) as http:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        url = f"{node.server.url}/v1/chat/completions"
        assert (await http.post(url, json=body)).status == 200
        assert len(await node.store.completions("c")) == 1
        assert await captures.forget("c") == 1
        assert (await http.post(url, json=body)).status in (401, 410)
    assert await node.store.session("c") is None
    assert await node.store.completions("c") == []
    assert await captures.forget("c") == 0, "once more: nothing"
    await captures.open(session_id="c")


async def test_a_session_that_is_forgotten_while_it_is_closed_stays_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures(node)
    await captures.open(session_id="c")
    finish = node.store.finish_session

    async def forgotten_first(*what: Any, **how: Any) -> None:
        await captures.forget("c")
        await finish(*what, **how)

    monkeypatch.setattr(node.store, "finish_session", forgotten_first)
    assert await captures.close("c") is not None
    assert await node.store.session("c") is None
    assert await node.store.results() == []
    assert captures.names == set()


async def post(node: Node, session: LiveSession, *bodies: object, path: str = "/v1/chat/completions") -> list[int]:
    """The statuses of some requests."""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {session.key}"}) as http:
        return [(await http.post(f"{node.server.url}{path}", json=body)).status for body in bodies]


LONG = {"model": "m", "messages": [{"role": "user", "content": "word " * 40_000}]}
BAD = {"model": "m", "messages": "none"}


@pytest.mark.parametrize("error", [None, "exit code 1"])
async def test_a_session_whose_calls_were_all_refused_says_so(node: Node, error: str | None) -> None:
    captures = Captures(node)
    session = await captures.open(session_id="c")
    assert await post(node, session, BAD, LONG, LONG) == [400, 400, 400]
    result = await captures.close("c", error=error)
    assert result is not None
    begin, end = "no model call: all 3 calls were refused, the last one: The prompt has ", "; the model takes 32768"
    assert result.status == "ERROR"
    assert str(result.error).startswith(begin)
    assert str(result.error).endswith(end if error is None else f"{end} ({error})")


async def test_a_refused_stream_counts_though_its_status_was_a_good_one(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polar.gateway.app.FIRST_BYTE", 0.0)
    captures = Captures(node)
    session = await captures.open(session_id="c")
    with pytest.raises(aiohttp.ClientPayloadError):
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {session.key}"}) as http:
            async with http.post(f"{node.server.url}/v1/chat/completions", json=LONG | {"stream": True}) as reply:
                assert reply.status == 200
                await reply.read()
    result = await captures.close("c")
    assert result is not None
    assert str(result.error).startswith("no model call: its only call was refused: The prompt has ")


async def test_a_refusal_beside_a_call_that_was_recorded_is_no_failure(node: Node) -> None:
    captures = Captures(node)
    session = await captures.open(session_id="c")
    good = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert await post(node, session, BAD, good) == [400, 200]
    result = await captures.close("c")
    assert result is not None
    assert (result.status, result.error) == ("COMPLETED", None)


async def test_what_is_no_model_call_is_no_refused_one(node: Node) -> None:
    captures = Captures(node)
    session = await captures.open(session_id="c")
    assert await post(node, session, BAD, path="/v1/messages/count_tokens") == [400]
    assert await post(node, session, BAD, path="/v1/nothing") == [404]
    result = await captures.close("c")
    assert result is not None
    assert (result.status, result.error) == ("COMPLETED", None)


async def test_a_refusal_is_kept_as_redacted_as_any_error(node: Node) -> None:
    node.redaction = Redaction([("no models", lambda text: text.replace("model", "[gone]"))])
    captures = Captures(node)
    session = await captures.open(session_id="c")
    await post(node, session, LONG)
    result = await captures.close("c")
    assert result is not None
    assert str(result.error).startswith("no model call: ")
    assert "the [gone] takes 32768" in str(result.error)


async def test_no_bare_session_gets_into_a_task(node: Node) -> None:
    agent = AgentSpec(harness="shell")
    await node.store.put_task(TaskRequest(task_id="real", instruction="i", agent=agent))
    with pytest.raises(StoreConflict, match="real"):
        await Captures(node).open(task_id="real")
