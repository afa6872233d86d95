"""Connections: how it starts, what breaks, what is tried again, and what closing a call does to the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar.contract.chat import Chat, Message, Sampling
from polar.contract.errors import UsageError
from polar.engines.base import ChatEngine, EngineError
from tests.engines.openai.conftest import HELLO, Start, call, ids
from tests.engines.openai.wire import MODELS, Reply, sse, whole, wire_server
from tests.support.script import Step
from tests.support.scripted import scripted_engine

GOOD = Reply(
    [
        sse(
            {"choices": [{"delta": {"content": ""}}], "prompt_token_ids": [1]},
            {"choices": [{"delta": {"content": "hi"}, "token_ids": [5], "finish_reason": "stop"}]},
        )
    ]
)
DEAD = Reply(raw=b"")
TOO_LONG = (
    "This model's maximum context length is 2048 tokens. However, you requested {total} tokens ({prompt} in the "
    "messages, {reply} in the completion)."
)


async def test_it_is_a_chat_engine(start: Start) -> None:
    async with wire_server() as wire:
        assert isinstance(await start(wire.url), ChatEngine)


async def test_start_learns_model_root_and_context(start: Start) -> None:
    async with wire_server() as wire:
        info = (await start(wire.url + "/v1/")).info
        assert (info.kind, info.model, info.model_path, info.context_length) == ("vllm", "m", "/models/m", 2048)
        assert info.url == wire.url


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:0", "http://a:b"])
async def test_what_is_no_address_of_a_server_is_said(start: Start, url: str) -> None:
    with pytest.raises(UsageError, match="is no http"):
        await start(url)


async def test_a_server_that_refuses_to_be_asked_for_token_ids_is_not_asked(start: Start) -> None:
    refused = whole({"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}, 400)
    text = whole({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
    async with wire_server(refused, text, text) as wire:
        wire.models = {"data": [MODELS | {"owned_by": "somebody"}]}
        engine = await start(wire.url, require_token_ids=False)
        assert not engine.info.template_args
        [chunk] = await call(engine, stream=False)
    assert chunk.message == Message("assistant", "hi")
    assert ["return_token_ids" in body for body in wire.bodies] == [True, False, False]
    assert wire.headers[0]["x-request-id"] == "polar-probe"


async def test_a_server_that_refuses_every_chat_is_asked_as_ever(start: Start) -> None:
    refused = whole({"error": {"message": "no such model here"}}, 400)
    async with wire_server(refused, refused, GOOD) as wire:
        wire.models = {"data": [MODELS | {"owned_by": "somebody"}]}
        assert ids(await call(await start(wire.url))) == [5]
    assert "return_token_ids" in wire.bodies[-1]


async def test_an_adapter_has_the_tokenizer_of_its_parent(start: Start) -> None:
    async with wire_server() as wire:
        adapter = {"id": "lora", "owned_by": "vllm", "root": "/adapters/lora", "parent": "m", "max_model_len": None}
        wire.models = {"data": [MODELS, adapter]}
        info = (await start(wire.url, model="lora")).info
        assert (info.model, info.model_path, info.context_length) == ("lora", "/models/m", 2048)


async def test_a_model_that_is_not_served_is_said_with_those_that_are(start: Start) -> None:
    async with wire_server() as wire:
        with pytest.raises(UsageError, match=r"does not serve the model 'other': choose one of m "):
            await start(wire.url, model="other")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "--engine-url must be the root"),
        (401, "POLAR_ENGINE_API_KEY"),
        (503, "still loading"),
        (500, "no list of models"),
    ],
)
async def test_a_server_that_is_none(status: int, words: str, start: Start) -> None:
    async with wire_server() as wire:
        wire.models_status = status
        with pytest.raises(UsageError, match=words) as caught:
            await start(wire.url)
        assert wire.url in str(caught.value)


async def test_nothing_answers(start: Start) -> None:
    async with wire_server() as wire:
        url = wire.url
    with pytest.raises(UsageError, match="no engine answers at") as caught:
        await start(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
async def test_an_address_that_is_none(url: str, start: Start) -> None:
    with pytest.raises(UsageError, match="no http"):
        await start(url)


async def test_the_key_the_request_id_and_the_session_travel_as_headers(start: Start) -> None:
    async with wire_server(GOOD) as wire:
        await call(await start(wire.url, api_key="secret"))
        sent = wire.headers[0]
    assert sent["authorization"] == "Bearer secret"
    assert (sent["x-request-id"], sent["x-session-id"]) == ("req-1", "session-1")


async def test_calls_in_a_row_share_a_connection(start: Start) -> None:
    async with wire_server(*[GOOD] * 3) as wire:
        engine = await start(wire.url)
        for _ in range(3):
            await call(engine)
        assert wire.connections == 1


async def test_a_kept_connection_that_dies_before_the_first_byte_is_tried_once_more(start: Start) -> None:
    async with wire_server(GOOD, DEAD, GOOD) as wire:
        engine = await start(wire.url)
        await call(engine)
        assert ids(await call(engine)) == [5]
        assert len(wire.bodies) == 3
        assert wire.bodies[1] == wire.bodies[2]
        assert wire.connections == 2


async def test_a_kept_connection_that_resets_while_the_body_is_sent_is_tried_once_more(start: Start) -> None:
    large = Chat(model="m", messages=(Message("user", "word " * 2_000_000),))
    async with wire_server(GOOD, Reply(raw=b"", early=True), GOOD) as wire:
        engine = await start(wire.url)
        await call(engine)
        assert ids(await call(engine, large)) == [5]
        assert (wire.resets, len(wire.bodies)) == (1, 2)


async def test_it_is_tried_only_once_more(start: Start) -> None:
    async with wire_server(DEAD, DEAD, GOOD) as wire:
        with pytest.raises(EngineError) as caught:
            await call(await start(wire.url))
        assert caught.value.kind == "unavailable"
        assert len(wire.bodies) == 2


async def test_a_fresh_connection_that_dies_is_not_tried_again(start: Start) -> None:
    async with wire_server(DEAD, GOOD) as wire:
        wire.keep_alive = False
        with pytest.raises(EngineError, match=wire.url) as caught:
            await call(await start(wire.url))
        assert caught.value.kind == "unavailable"
        assert len(wire.bodies) == 1


@pytest.mark.parametrize("raw", [b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
async def test_once_a_byte_has_come_nothing_is_tried_again(raw: bytes, start: Start) -> None:
    async with wire_server(GOOD, Reply(raw=raw), GOOD) as wire:
        engine = await start(wire.url)
        await call(engine)
        with pytest.raises(EngineError) as caught:
            await call(engine, stream=False)
        assert caught.value.kind == "unavailable"
        assert len(wire.bodies) == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reply_cut_in_the_middle_is_unavailable(stream: bool, start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="The capital of France", cut_after=2)]) as engine:
        with pytest.raises(EngineError) as caught:
            await call(await start(engine.url), stream=stream)
    assert caught.value.kind == "unavailable"
    assert engine.url in str(caught.value)


async def test_a_stream_that_just_ends_is_unavailable(start: Start) -> None:
    begun = sse({"choices": [{"delta": {"content": "a"}, "token_ids": [5]}], "prompt_token_ids": [1]}, done=False)
    async with wire_server(Reply([begun])) as wire:
        with pytest.raises(EngineError, match="finish reason"):
            await call(await start(wire.url))


@pytest.mark.parametrize("stream", [True, False])
async def test_giving_up_a_call_ends_the_generation(stream: bool, start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="The capital of France", hold_after=2)]) as engine:
        calling = asyncio.create_task(call(await start(engine.url), stream=stream))
        log = engine.model.log
        await log.wait_for(lambda generations: len(generations) == 1 and len(generations[0].sampled_ids) == 2)
        calling.cancel()
        await log.wait_for(lambda generations: generations[0].ended == "cancelled")
        with pytest.raises(asyncio.CancelledError):
            await calling


async def test_closing_the_iterator_ends_the_generation(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="The capital of France", hold_after=2)]) as engine:
        chunks = (await start(engine.url)).chat(HELLO, request_id="r", affinity="s")
        await anext(chunks)
        await chunks.aclose()
        await engine.model.log.wait_for(lambda generations: generations[0].ended == "cancelled")


async def test_two_hundred_calls_run_at_a_time(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris", hold_after=0)]) as engine:
        client = await start(engine.url)
        calls = [asyncio.create_task(call(client)) for _ in range(200)]
        await engine.model.log.wait_for(lambda generations: len(generations) == 200)
        engine.model.release()
        assert len(await asyncio.gather(*calls)) == 200


async def test_calls_over_the_limit_wait_and_are_counted(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris", hold_after=0)]) as engine:
        client = await start(engine.url, max_inflight=2)
        calls = [asyncio.create_task(call(client)) for _ in range(5)]
        await engine.model.log.wait_for(lambda generations: len(generations) == 2)
        assert client.waiting == 3
        engine.model.release()
        await asyncio.gather(*calls)
        assert client.waiting == 0
        assert client.slot_waits.buckets()[-1] == ("+Inf", 5.0)
        assert client.slot_waits.seconds > 0.0


async def test_where_only_prompt_and_limit_together_are_too_long_the_limit_goes(start: Start) -> None:
    refused = whole({"error": {"message": TOO_LONG.format(total=2060, prompt=60, reply=2000)}}, 400)
    async with wire_server(refused, GOOD) as wire:
        chat = Chat(model="m", messages=(Message("user", "Hi"),), sampling=Sampling(max_tokens=2000))
        assert ids(await call(await start(wire.url), chat)) == [5]
        assert wire.bodies[0]["max_tokens"] == 2000
        assert "max_tokens" not in wire.bodies[1]


async def test_a_prompt_that_is_too_long_alone_is_refused_at_once(start: Start) -> None:
    refused = whole({"error": {"message": TOO_LONG.format(total=3010, prompt=3000, reply=10)}}, 400)
    async with wire_server(refused) as wire:
        chat = Chat(model="m", messages=(Message("user", "Hi"),), sampling=Sampling(max_tokens=10))
        with pytest.raises(EngineError) as caught:
            await call(await start(wire.url), chat)
        assert (caught.value.kind, caught.value.prompt_tokens) == ("context_length", 3000)
        assert len(wire.bodies) == 1


async def test_close_ends_running_calls_and_may_be_called_twice(start: Start, model_dir: Path) -> None:
    async with scripted_engine(model_dir, [Step(text="Paris", hold_after=0)]) as engine:
        client = await start(engine.url)
        calling = asyncio.create_task(call(client))
        await engine.model.log.wait_for(lambda generations: len(generations) == 1)
        await client.close()
        await client.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(calling, 5)
