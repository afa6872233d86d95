"""What is found out at the start: which server, what it can do, and whether it is one or a router before some."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from polar.contract.errors import UsageError
from polar.engines import make_engine, questions
from polar.engines.base import ChatEngine, Checkable, EngineError, TokenEngine
from polar.engines.pool import Pool
from polar.engines.probing import probe, workers_at
from polar.engines.sglang import SGLangEngine
from polar.engines.sglang_server import workers_behind
from polar.engines.sglang_workers import SGLangWorkers
from tests.engines.openai.wire import wire_server
from tests.engines.sglang.conftest import Start, call
from tests.support.router import WORKER, router
from tests.support.script import Step
from tests.support.scripted_sglang import ScriptedSGLang, scripted_sglang
from tests.support.tinymodel import make_tiny_model


async def until(pool: Pool[Any], urls: list[str]) -> None:
    """Until the pool has just these servers."""
    async with asyncio.timeout(10), pool.changed:
        await pool.changed.wait_for(lambda: [load.url for load in pool.load()] == urls)


async def test_new_weights_do_not_lose_the_server_its_name(
    start: Start, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang calls itself by the path of the weights that it was given last."""
    async with scripted_sglang(model_dir, []) as engine:
        engine.server.name = "/checkpoints/step-42"
        with caplog.at_level(logging.WARNING):
            client = await start(engine.url, model="scripted")
    assert (client.info.model, client.info.chat_only) == ("/checkpoints/step-42", None)
    assert "lists no model 'scripted', but only /checkpoints/step-42: taking it" in caplog.text


@pytest.mark.parametrize("model", [None, "scripted"])
async def test_servers_with_weights_of_different_age_are_one_pool(model_dir: Path, model: str | None) -> None:
    async with scripted_sglang(model_dir, []) as old, scripted_sglang(model_dir, []) as new:
        new.server.name = "/checkpoints/step-42"
        pool = make_engine("sglang", url=f"{old.url},{new.url}", model=model)
        await pool.start()
        assert pool.info.model == "scripted"
        await pool.close()


async def test_servers_with_other_tokenizers_are_no_pool(model_dir: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other")
    async with scripted_sglang(model_dir, []) as one, scripted_sglang(other, []) as two:
        pool = make_engine("sglang", url=f"{one.url},{two.url}")
        with pytest.raises(UsageError, match="engines of one pool must be alike"):
            await pool.start()


async def test_it_takes_ids_and_it_chats(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [], max_model_len=2048) as engine:
        client = await start(engine.url)
        assert isinstance(client, TokenEngine)
        assert isinstance(client, ChatEngine)
        assert isinstance(client, Checkable)
        await client.check()
        info = client.info
    assert (info.kind, info.version, info.context_length) == ("sglang", "0.5.23", 2048)
    assert (info.model_path, info.logprobs, info.chat_only) == (str(model_dir), "temperature", None)


async def test_what_it_can_do(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [], disable_radix_cache=True) as engine:
        found = await probe(engine.url)
    assert (found.kind, found.token_route, found.weight_versions) == ("sglang", "/generate", True)
    assert (found.weight_updates, found.structured_outputs, found.images) == (True, True, False)
    assert (found.prefix_caching, found.renders, found.chat_ids) == (False, False, False)
    assert [lack.what for lack in found.missing] == ["token ids of chat completions", "prefix caching"]


async def test_tito_that_can_not_be_had_is_refused_at_the_start(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [], stripped=["meta_info"]) as engine:
        with pytest.raises(UsageError, match="can't be used with --mode tito: it has no token ids"):
            await start(engine.url, mode="tito")


async def test_a_tokenizer_that_is_not_there_is_refused_at_the_start(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        with pytest.raises(UsageError, match="--tokenizer nowhere"):
            await start(engine.url, tokenizer="nowhere")


async def test_a_paused_server_is_not_taken_for_one_that_only_chats(
    start: Start, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "_SECONDS", 0.2)

    async def paused(_request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    monkeypatch.setattr(ScriptedSGLang, "_generate", staticmethod(paused))
    async with scripted_sglang(model_dir, []) as engine:
        with pytest.raises(UsageError, match=r"/generate did not answer .* is the engine paused\?"):
            await start(engine.url)


async def test_another_server_is_said_to_be_one(start: Start) -> None:
    async with wire_server() as wire:
        with pytest.raises(UsageError, match="is no SGLang server") as caught:
            await start(wire.url)
        assert wire.url in str(caught.value)


async def test_a_server_that_went_away_is_unavailable(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        client = await start(engine.url)
    with pytest.raises(EngineError) as caught:
        await client.check()
    assert caught.value.kind == "unavailable"


async def test_a_scheduler_that_hangs_is_seen_though_its_server_answers(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        client = await start(engine.url)
        await client.check()
        engine.server.hung = True
        client._health_seconds = 0.1
        with pytest.raises(EngineError, match="/server_info did not answer") as caught:
            await client.check()
        assert caught.value.kind == "unavailable"
        engine.server.hung = False
        client._health_seconds = 30.0
        await client.check()


async def test_a_call_leaves_a_server_whose_scheduler_hangs(monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    monkeypatch.setattr(SGLangEngine, "_health_seconds", 0.1)
    hi = [Step(text="hi")]
    async with scripted_sglang(model_dir, hi) as one, scripted_sglang(model_dir, hi) as two:
        pool = make_engine("sglang", url=f"{one.url},{two.url}")
        assert isinstance(pool, SGLangWorkers)
        pool._probe_seconds = 0.01
        await pool.start()
        one.server.hung = True
        try:
            async with asyncio.timeout(20):
                chunks = await call(cast(SGLangEngine, pool))
        finally:
            await pool.close()
    assert chunks[-1].finish_reason == "stop"
    assert (len(one.model.log.generations), len(two.model.log.generations)) == (0, 1)


async def test_a_router_is_no_server_and_says_who_is(start: Start) -> None:
    async with router(WORKER, WORKER | {"url": "http://127.0.0.1:2"}) as url:
        with pytest.raises(UsageError, match=r"is a router.*--engine-url http://127.0.0.1:1,http://127.0.0.1:2$"):
            await start(url)


@pytest.mark.parametrize("old", [False, True])
async def test_the_workers_behind_a_router(old: bool) -> None:
    async with router(WORKER, WORKER | {"url": "http://127.0.0.1:2/"}, old=old) as url:
        assert await workers_behind(url + "/v1") == ["http://127.0.0.1:1", "http://127.0.0.1:2"]


async def test_a_server_with_several_ranks_is_one_worker_and_a_sick_one_is_none() -> None:
    ranks = [WORKER | {"url": f"http://127.0.0.1:1@{rank}"} for rank in range(2)]
    async with router(*ranks, WORKER | {"url": "http://127.0.0.1:3", "is_healthy": False}) as url:
        assert await workers_behind(url) == ["http://127.0.0.1:1"]


async def test_a_server_has_no_workers_but_itself(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as engine:
        assert await workers_behind(engine.url + "/v1/") == [engine.url]


@pytest.mark.parametrize("worker", [{"worker_type": "prefill"}, {"url": "grpc://127.0.0.1:1"}])
async def test_workers_that_can_not_be_talked_to_alone(worker: dict[str, Any]) -> None:
    async with router(WORKER | worker) as url:
        for mode in (None, "tito", "chat"):
            engine = make_engine("sglang", url=url, mode=mode)
            with pytest.raises(UsageError, match=r"splits a call over several servers.*--engine openai") as caught:
                await engine.start()
            assert worker.get("url", WORKER["url"]) in str(caught.value)
            assert "\n" not in str(caught.value)
        way_out = make_engine("openai", url=url)
        await way_out.start()
        await way_out.close()


async def test_a_router_without_workers() -> None:
    async with router() as url:
        with pytest.raises(UsageError, match="has no healthy worker"):
            await workers_behind(url)


async def test_a_router_with_a_key() -> None:
    async with router(WORKER, key="secret") as url:
        assert await workers_behind(url, api_key="secret") == ["http://127.0.0.1:1"]
        with pytest.raises(UsageError, match="POLAR_ENGINE_API_KEY"):
            await workers_behind(url)


async def test_a_server_that_refuses_paths_it_does_not_know_is_no_router() -> None:
    async with router(WORKER, key="secret") as url:  # its models are listed without the key
        assert await workers_at(url) == []
        assert await workers_at(url, api_key="secret") == ["http://127.0.0.1:1"]


async def test_nothing_answers() -> None:
    async with router(WORKER) as url:
        pass
    with pytest.raises(UsageError, match="no engine answers at") as caught:
        await workers_behind(url)
    assert "\n" not in str(caught.value)


def test_it_is_made_by_name() -> None:
    engine = make_engine("sglang", url="http://127.0.0.1:30000/v1", mode="tito", max_inflight=4)
    assert isinstance(engine, SGLangWorkers)


async def test_a_router_is_left_out_and_its_workers_are_the_engine(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")]) as one, scripted_sglang(model_dir, []) as other:
        async with router(WORKER | {"url": one.url}, WORKER | {"url": other.url}) as url:
            engine = make_engine("sglang", url=url)
            await engine.start()
            try:
                assert isinstance(engine, Pool)
                assert [member.url for member in engine.load()] == [one.url, other.url]
                assert engine.info.chat_only is None
            finally:
                await engine.close()


async def test_a_worker_that_a_router_gets_later_is_used_and_one_that_is_gone_is_forgotten(model_dir: Path) -> None:
    async with scripted_sglang(model_dir, []) as second, AsyncExitStack() as first_stack:
        first = await first_stack.enter_async_context(scripted_sglang(model_dir, []))
        one, two = WORKER | {"url": first.url}, WORKER | {"url": second.url, "is_healthy": False}
        async with router(one, two) as url:
            engine = make_engine("sglang", url=url)
            assert isinstance(engine, Pool)
            engine._probe_seconds = 0.01
            await engine.start()
            try:
                assert [load.url for load in engine.load()] == [first.url]
                two["is_healthy"] = True
                await until(engine, [first.url, second.url])
                one["is_healthy"] = False
                await first_stack.aclose()
                await until(engine, [second.url])
            finally:
                await engine.close()


async def test_a_router_that_is_away_is_no_news_of_another(model_dir: Path) -> None:
    servers = [scripted_sglang(model_dir, []) for _ in range(3)]
    async with servers[0] as first, servers[1] as second, servers[2] as third, AsyncExitStack() as away:
        gone = await away.enter_async_context(router(WORKER | {"url": first.url}))
        late = WORKER | {"url": third.url, "is_healthy": False}
        async with router(WORKER | {"url": second.url}, late) as url:
            engine = make_engine("sglang", url=f"{gone},{url}")
            assert isinstance(engine, Pool)
            engine._probe_seconds = 0.01
            await engine.start()
            try:
                await away.aclose()
                late["is_healthy"] = True
                await until(engine, [first.url, second.url, third.url])
            finally:
                await engine.close()


async def test_a_worker_of_another_model_that_a_router_gets_later_is_left_out(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other_dir = make_tiny_model(tmp_path / "other")
    async with scripted_sglang(model_dir, []) as first, scripted_sglang(other_dir, []) as second:
        async with router(WORKER | {"url": first.url}) as url:
            engine = make_engine("sglang", url=url)
            assert isinstance(engine, SGLangWorkers)
            await engine.start()
            try:
                for _ in range(2):
                    await engine._take_in(second.url)
                assert [load.url for load in engine.load()] == [first.url]
            finally:
                await engine.close()
    assert caplog.text.count(f"names engine {second.url}, which is left out: ") == 1, "said once"


async def test_the_script_is_not_used_up_by_the_questions(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")]) as engine:
        await start(engine.url)
        assert not engine.model.log.generations
