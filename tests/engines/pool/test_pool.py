"""Several servers of one model as one engine: where calls go, and what becomes of them when a server fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from polar.contract.chat import Chat, Message
from polar.contract.errors import UsageError
from polar.engines import make_engine
from polar.engines.base import ChatEngine, EngineError, TokenEngine
from polar.engines.openai import OpenAIEngine
from polar.engines.pool import ChatPool, RenderingPool, TokenPool, pool_of
from tests.engines.pool.servers import Server, ask, begin
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model

STEP = Step(text="one two three")
HELD = Step(text="one two three", hold_after=1)
FOREVER = 3600.0
MakePool = Callable[..., Any]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def make_pool(model_dir: Path) -> AsyncIterator[MakePool]:
    """A started pool of scripted servers ``a``, ``b``, ..., a step each. It looks at them only when told to."""
    async with AsyncExitStack() as stack:

        async def make(*steps: Step, **options: Any) -> tuple[TokenPool[Server], list[Server]]:
            servers = [Server(model_dir, name, step) for name, step in zip("abcd", steps, strict=False)]
            pool = TokenPool(servers, **{"probe_seconds": FOREVER, **options})
            stack.push_async_callback(pool.close)
            await pool.start()
            return pool, servers

        yield make


def asked(servers: list[Server]) -> list[int]:
    return [server.asked for server in servers]


async def until(pool: TokenPool[Server], health: list[bool]) -> None:
    """Until the pool thinks so of its servers."""
    async with asyncio.timeout(10), pool.changed:
        await pool.changed.wait_for(lambda: [load.healthy for load in pool.load()] == health)


async def test_a_session_stays_with_its_server_and_new_ones_spread(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP, STEP)
    for session in ("s1", "s2", "s3"):
        await ask(pool, session)
    assert asked(servers) == [1, 1, 1]
    for _ in range(3):
        await ask(pool, "s2")
    assert asked(servers) == [1, 4, 1]
    assert [load.sessions for load in pool.load()] == [1, 1, 1]


async def test_a_new_session_goes_where_the_least_is_under_way(make_pool: MakePool) -> None:
    pool, servers = await make_pool(HELD, STEP)
    call = begin(pool, "busy")
    await anext(call)
    assert [load.inflight for load in pool.load()] == [1, 0]
    for session in ("s1", "s2", "s3"):
        await ask(pool, session)
    assert asked(servers) == [1, 3]
    await call.aclose()
    servers[0].model.release()
    await ask(pool, "s4")
    assert asked(servers) == [2, 3], "nothing is under way anywhere: the one with fewer sessions"


async def test_a_server_that_is_not_there_is_left_out_and_its_sessions_move(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP)
    await ask(pool, "s1")
    servers[0].down = True
    reply = await ask(pool, "s1")
    assert reply[-1].finish_reason == "stop"
    await ask(pool, "s1")
    assert asked(servers) == [2, 2], "tried once, then no more"
    assert [(load.healthy, load.sessions) for load in pool.load()] == [(False, 0), (True, 1)]


async def test_a_server_comes_back_when_it_answers_again(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP, probe_seconds=0.001)
    servers[0].down = True
    await until(pool, [False, True])
    for session in ("s1", "s2"):
        await ask(pool, session)
    assert asked(servers) == [0, 2]
    servers[0].down = False
    await until(pool, [True, True])
    await ask(pool, "s3")
    assert asked(servers) == [1, 2]


async def test_a_server_that_says_it_is_not_well_is_left_out(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP, probe_seconds=0.001)
    servers[1].ill = True
    await until(pool, [True, False])
    for session in ("s1", "s2"):
        await ask(pool, session)
    assert asked(servers) == [2, 0]


async def test_a_look_that_has_no_answer_yet_keeps_no_news_of_the_others(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP, probe_seconds=0.001)
    servers[0].mute = True
    servers[1].ill = True
    await until(pool, [True, False])
    servers[1].ill = False
    await until(pool, [True, True])
    assert [load.healthy for load in pool.load()] == [True, True]


async def test_a_call_does_not_wait_for_a_server_that_hangs(make_pool: MakePool) -> None:
    pool, servers = await make_pool(Step(text="one two three", hold_after=0), STEP, probe_seconds=0.001)
    call = asyncio.create_task(ask(pool, "s1"))
    await servers[0].model.log.wait_for(bool)
    servers[0].ill = True
    async with asyncio.timeout(10):
        reply = await call
    assert reply[-1].finish_reason == "stop"
    assert [generation.ended for generation in servers[0].model.log.generations] == ["cancelled"]
    assert [(load.healthy, load.inflight) for load in pool.load()] == [(False, 0), (True, 0)]


async def test_a_call_that_has_nowhere_else_to_go_waits_until_it_has(make_pool: MakePool) -> None:
    pool, servers = await make_pool(Step(text="one two three", hold_after=0), STEP, probe_seconds=0.001)
    servers[1].ill = True
    await until(pool, [True, False])
    call = asyncio.create_task(ask(pool, "s1"))
    await servers[0].model.log.wait_for(bool)
    servers[0].ill = True
    await until(pool, [False, False])
    assert not call.done()
    servers[1].ill = False
    async with asyncio.timeout(10):
        assert (await call)[-1].finish_reason == "stop"
    assert asked(servers) == [1, 1]


async def test_a_reply_that_has_begun_is_left_to_its_server(make_pool: MakePool) -> None:
    pool, servers = await make_pool(HELD, STEP, probe_seconds=0.001)
    call = begin(pool, "s1")
    await anext(call)
    servers[0].ill = True
    await until(pool, [False, True])
    servers[0].model.release()
    assert [chunk async for chunk in call][-1].finish_reason == "stop"
    assert asked(servers) == [1, 0]


async def test_after_the_first_token_a_failure_is_a_failure(make_pool: MakePool) -> None:
    pool, servers = await make_pool(Step(text="one two three four", cut_after=2), STEP)
    chunks = []
    with pytest.raises(EngineError) as caught:
        async for chunk in begin(pool, "s1"):
            chunks.append(chunk)
    assert caught.value.kind == "unavailable"
    assert sum(len(chunk.ids) for chunk in chunks) == 2
    assert asked(servers) == [1, 0]


async def test_an_overloaded_server_passes_its_call_on_and_stays(make_pool: MakePool) -> None:
    pool, servers = await make_pool(Step(status=503), STEP)
    await ask(pool, "s1")
    assert asked(servers) == [1, 1]
    assert all(load.healthy for load in pool.load())


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_that_is_the_calls_own_is_not_tried_elsewhere(make_pool: MakePool, status: int) -> None:
    pool, servers = await make_pool(Step(status=status), STEP)
    with pytest.raises(EngineError):
        await ask(pool, "s1")
    assert sum(asked(servers)) == 1


async def test_a_call_that_ends_servers_does_not_end_them_all(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP, STEP, STEP)
    for server in servers:
        server.down = True
    with pytest.raises(EngineError, match="the connection failed"):
        await ask(pool, "s1")
    assert sum(asked(servers)) == 3


async def test_with_all_servers_out_a_call_tries_all_the_same(make_pool: MakePool) -> None:
    pool, servers = await make_pool(STEP, STEP)
    for server in servers:
        server.down = True
    with pytest.raises(EngineError):
        await ask(pool, "s1")
    servers[0].down = servers[1].down = False
    assert (await ask(pool, "s1"))[-1].finish_reason == "stop"


async def test_a_call_that_nobody_waits_for_ends_on_its_server(make_pool: MakePool) -> None:
    """C6 through a pool."""
    pool, servers = await make_pool(HELD, STEP)
    call = begin(pool, "s1")
    await anext(call)
    await call.aclose()
    [generation] = servers[0].model.log.generations
    assert generation.ended == "cancelled"
    assert [load.inflight for load in pool.load()] == [0, 0]


async def test_sessions_that_are_long_idle_are_forgotten(make_pool: MakePool) -> None:
    pool, _ = await make_pool(STEP, STEP, idle_seconds=0.0)
    for number in range(20):
        await ask(pool, f"s{number}")
    assert sum(load.sessions for load in pool.load()) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "another"}, "http://b serves the model another, but http://a scripted"),
        ({"model_path": "/models/step-7"}, "http://b serves the weights in /models/step-7, but http://a"),
        ({"logprobs": "raw"}, "http://b serves logprobs that are raw, but http://a unknown"),
        ({"chat_only": "it is old"}, "http://b serves calls in mode chat, but http://a tito"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
async def test_servers_that_are_not_alike_are_refused(model_dir: Path, changes: dict[str, Any], words: str) -> None:
    servers = [Server(model_dir, "a", STEP), Server(model_dir, "b", STEP, **changes)]
    with pytest.raises(UsageError) as caught:
        await pool_of(servers).start()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert all(server.closed for server in servers)


async def test_one_that_is_not_there_at_the_start_is_named(model_dir: Path) -> None:
    async with scripted_engine(model_dir, [STEP]) as running:
        pool = pool_of([OpenAIEngine(running.url), OpenAIEngine("http://127.0.0.1:1")])
        with pytest.raises(UsageError, match=r"no engine answers at http://127\.0\.0\.1:1"):
            await pool.start()


async def test_the_pool_promises_the_shortest_context(model_dir: Path) -> None:
    pool = pool_of([Server(model_dir, "a", STEP), Server(model_dir, "b", STEP, context_length=512)])
    await pool.start()
    assert pool.info.context_length == 512
    await pool.close()


async def test_a_pool_is_what_its_servers_are(model_dir: Path) -> None:
    token, chat = Server(model_dir, "a", STEP), OpenAIEngine("http://127.0.0.1:1")
    assert pool_of([token]) is token
    tokens = pool_of([token, Server(model_dir, "b", STEP)])
    async with scripted_engine(model_dir, [STEP]) as running:
        chats = pool_of([OpenAIEngine(running.url), OpenAIEngine(running.url)])
        for pool, kinds in ((tokens, (True, False)), (chats, (False, True))):
            await pool.start()
            assert (isinstance(pool, TokenEngine), isinstance(pool, ChatEngine)) == kinds
            await pool.close()
    with pytest.raises(UsageError, match="one --engine kind"):
        pool_of([token, chat])


async def test_waiting_calls_are_seen_on_the_server_they_wait_for(model_dir: Path) -> None:
    hello = Chat(model="m", messages=(Message("user", "Hello"),))
    async with scripted_engine(model_dir, [HELD]) as one, scripted_engine(model_dir, [HELD]) as two:
        pool = ChatPool([OpenAIEngine(one.url, max_inflight=1), OpenAIEngine(two.url, max_inflight=1)])
        await pool.start()

        async def call(session: str) -> str | None:
            chunks = [c async for c in pool.chat(hello, request_id="r", affinity=session)]
            return chunks[-1].finish_reason

        calls = [asyncio.create_task(call("same")) for _ in range(3)]
        calls.append(asyncio.create_task(call("other")))
        await one.model.log.wait_for(lambda log: bool(log) and len(log[0].sampled_ids) > 0)
        assert [(load.inflight, load.waiting) for load in pool.load()] == [(3, 2), (1, 0)]
        one.model.release()
        two.model.release()
        assert set(await asyncio.gather(*calls)) == {"stop"}
        assert [(load.inflight, load.waiting) for load in pool.load()] == [(0, 0), (0, 0)]
        await pool.close()


async def test_a_server_that_dies_is_said_once(make_pool: MakePool, caplog: pytest.LogCaptureFixture) -> None:
    pool, servers = await make_pool(STEP, STEP)
    servers[0].down = True
    with caplog.at_level(logging.WARNING, "polar.engines"):
        await asyncio.gather(*(ask(pool, f"s{number}") for number in range(4)))
    assert len([record for record in caplog.records if "left out" in record.getMessage()]) == 1


def test_several_addresses_are_named_with_commas() -> None:
    assert isinstance(make_engine("openai", url="http://127.0.0.1:1, http://127.0.0.1:2/v1"), ChatPool)
    assert isinstance(make_engine("vllm", url="http://127.0.0.1:1,http://127.0.0.1:2"), RenderingPool)
    with pytest.raises(UsageError, match="--engine-url two is no address"):
        make_engine("vllm", url="http://127.0.0.1:1,two")
