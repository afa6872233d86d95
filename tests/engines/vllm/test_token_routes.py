"""Both routes that take token ids: what the engine meant is what we read, through every fault it can have."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.contract.completion import WeightSpan
from polar.engines.base import ChatEngine, EngineError, RenderingEngine, TokenChunk, TokenEngine
from polar.engines.vllm import VLLMEngine
from polar.engines.vllm_wire import COMPLETIONS, GENERATE, TokensReader
from tests.engines.openai.wire import Reply, sse, wire_server
from tests.engines.vllm.conftest import PROMPT, STOP, MakeBench, logprobs, sampled
from tests.support.script import Step

WORDS = "The capital of France is Paris"
_PIECE = {"choices": [{"index": 0, "token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}]}}]}
_END = {"choices": [{"index": 0, "token_ids": [2], "logprobs": None, "finish_reason": "stop"}]}
GOOD = Reply([sse(_PIECE, _END)])


@asynccontextmanager
async def unasked(url: str, asked: VLLMEngine) -> AsyncIterator[VLLMEngine]:
    """An engine at ``url`` that knows what ``asked`` was told, so that the wire has only the calls of the test."""
    engine = VLLMEngine(url)
    engine._upstream.open()
    engine._info, engine.capabilities = asked.info, asked.capabilities
    try:
        yield engine
    finally:
        await engine.close()


async def all_of(engine: VLLMEngine) -> list[TokenChunk]:
    stream = engine.generate(ids(PROMPT), Sampling(), stop_ids=STOP, request_id="r", affinity="s")
    return [chunk async for chunk in stream]


async def test_it_speaks_every_protocol(bench: MakeBench) -> None:
    engine = (await bench([])).engine
    assert isinstance(engine, TokenEngine)
    assert isinstance(engine, ChatEngine)
    assert isinstance(engine, RenderingEngine)


@pytest.mark.parametrize("chunk_tokens", [1, 3])
async def test_ids_and_logprobs_are_the_engine_s_own(bench: MakeBench, route: str, chunk_tokens: int) -> None:
    world = await bench([Step(text=WORDS, chunk_tokens=chunk_tokens)], route)
    chunks = await world.call()
    (generation,) = world.model.log.generations
    assert generation.route == route.rsplit("/", 1)[1]
    assert generation.context_ids == PROMPT
    assert sampled(chunks) == generation.sampled_ids
    assert logprobs(chunks) == generation.logprobs
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(generation.sampled_ids)
    assert chunks[-1].usage.prompt_tokens == len(PROMPT)


async def test_pieces_come_while_the_reply_goes_on(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, hold_after=2)], route)
    stream = world.engine.generate(ids(PROMPT), Sampling(), stop_ids=STOP, request_id="r", affinity="s")
    first = await asyncio.wait_for(anext(stream), 5)
    assert first.ids
    assert first.finish_reason is None
    world.model.release()
    rest = [chunk async for chunk in stream]
    assert rest[-1].finish_reason == "stop"


async def test_every_sampling_field_and_both_stops_are_sent(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text="Paris")], route)
    sampling = Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        max_tokens=17,
        stop=("\n\n",),
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -1.5},
    )
    await world.call(sampling)
    body = world.model.log.generations[0].request
    sent = body["sampling_params"] if route == GENERATE else body
    expected = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 17,
        "stop": ["\n\n"],
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.5},
        "stop_token_ids": sorted(STOP),
        "logprobs": 0,
    }
    assert {name: sent[name] for name in expected} == expected


async def test_what_a_call_leaves_open_is_neutral_and_its_limit_is_the_context(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text="Paris")], route)
    await world.call(Sampling())
    body = world.model.log.generations[0].request
    sent = body["sampling_params"] if route == GENERATE else body
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (1.0, 1.0, -1)
    assert sent["max_tokens"] == world.engine.info.context_length - len(PROMPT)


async def test_generate_tells_the_weights_of_each_token(bench: MakeBench) -> None:
    world = await bench([Step(text=WORDS, hold_after=2)])
    calling = asyncio.create_task(world.call())
    await world.model.log.wait_for(lambda generations: len(generations) == 1 and len(generations[0].sampled_ids) == 2)
    world.model.weight_version = "step-1"
    world.model.release()
    chunks = await calling
    total = len(sampled(chunks))
    assert list(chunks[-1].weight_spans) == [WeightSpan("default", 0, 2), WeightSpan("step-1", 2, total)]


async def test_a_stop_string_ends_the_reply_with_all_that_comes_at_its_end(bench: MakeBench) -> None:
    world = await bench([Step(text=WORDS)])
    chunks = await world.call(Sampling(max_tokens=64, stop=("France",)))
    assert (chunks[-1].finish_reason, chunks[-1].stop_sequence) == ("stop", "France")
    assert chunks[-1].weight_spans
    assert sampled(chunks) == world.model.log.generations[0].sampled_ids


@pytest.mark.parametrize("reason", ["abort", "length"])
async def test_other_ends_come_through_with_what_was_sampled(bench: MakeBench, route: str, reason: str) -> None:
    world = await bench([Step(text=WORDS, finish_reason=reason)], route)  # type: ignore[arg-type]
    chunks = await world.call()
    assert chunks[-1].finish_reason == reason
    assert sampled(chunks) == world.model.log.generations[0].sampled_ids


async def test_an_abort_before_the_first_token_is_no_error(bench: MakeBench) -> None:
    end = {"choices": [{"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort"}]}
    async with wire_server(Reply([sse(end)])) as wire, unasked(wire.url, (await bench([])).engine) as engine:
        (chunk,) = await all_of(engine)
    assert (chunk.finish_reason, list(chunk.ids)) == ("abort", [])


# ---- ids ----------------------------------------------------------------------------------------------------


async def test_ids_that_are_missing_are_read_from_the_logprobs(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, omit_token_ids=True, ids_in_logprobs=True)], route)
    assert sampled(await world.call()) == world.model.log.generations[0].sampled_ids


async def test_ids_are_never_made_up_from_text(bench: MakeBench) -> None:
    world = await bench([Step(text=WORDS, omit_token_ids=True)], COMPLETIONS)
    with pytest.raises(EngineError, match="token_ids") as caught:
        await world.call()
    assert caught.value.kind == "no_token_ids"
    assert world.url + COMPLETIONS in str(caught.value)
    # At the first chunk, not when the whole reply is there.
    assert len(world.model.log.generations) == 1


@pytest.mark.parametrize("odd", [None, "5", 2**31])
def test_what_is_no_id_ends_the_call(odd: object) -> None:
    event = {"choices": [{"index": 0, "token_ids": [5, odd], "finish_reason": "stop"}]}
    with pytest.raises(EngineError, match=r"token_ids\[1\]"):
        TokensReader("http://engine").feed(json.dumps(event).encode())


@pytest.mark.parametrize("lost", [[[5], [6]], [[5, 6], []]])
def test_a_reply_that_lost_ids_is_passed_on_in_doubt(lost: list[list[int]]) -> None:
    """A1."""
    entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.5}]
    reader = TokensReader("http://engine")
    for found, finish in zip(lost, (None, "stop"), strict=True):
        choice = {"index": 0, "token_ids": found, "logprobs": {"content": entries}, "finish_reason": finish}
        reader.feed(json.dumps({"choices": [choice]}).encode())
    last = reader.finish()
    assert list(last.ids) == [5, 6]
    assert "some are lost" in (last.doubt or "")


async def test_a_reply_without_ids_and_logprobs_is_said(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, omit_token_ids=True, logprobs="omit")], route)
    with pytest.raises(EngineError, match=world.url + route) as caught:
        await world.call()
    assert caught.value.kind == "no_token_ids"


async def test_a_count_that_is_off_comes_through(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, usage_extra=2)], route)
    chunks = await world.call()
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(sampled(chunks)) + 2


# ---- logprobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["null", "nan", "inf", "bool"])
async def test_a_logprob_that_is_no_number_is_nan_and_the_reply_is_served(
    bench: MakeBench, route: str, fault: str
) -> None:
    world = await bench([Step(text=WORDS, logprobs=fault)], route)  # type: ignore[arg-type]
    chunks = await world.call()
    *good, last = logprobs(chunks)
    assert sampled(chunks) == world.model.log.generations[0].sampled_ids
    assert not math.isfinite(last)
    assert good == world.model.log.generations[0].logprobs[:-1]


async def test_the_sentinel_comes_as_it_is(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, logprobs="sentinel")], route)
    assert logprobs(await world.call())[-1] == -9999.0


async def test_missing_logprobs_leave_the_ids(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, logprobs="omit")], route)
    chunks = await world.call()
    assert sampled(chunks) == world.model.log.generations[0].sampled_ids
    assert not logprobs(chunks)


# ---- the connection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "bad_request"), (429, "overloaded"), (503, "overloaded"), (500, "unavailable")]
)
async def test_errors_keep_their_kind(bench: MakeBench, route: str, status: int, kind: str) -> None:
    world = await bench([Step(status=status, error="because")], route)
    with pytest.raises(EngineError, match="because") as caught:
        await world.call()
    assert caught.value.kind == kind


async def test_an_error_in_the_middle_of_a_stream(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, error_after=2, error="the GPU is gone")], route)
    with pytest.raises(EngineError, match="the GPU is gone") as caught:
        await world.call()
    assert caught.value.kind == "unavailable"


async def test_a_prompt_that_is_too_long_is_said_in_numbers(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS)], route)
    with pytest.raises(EngineError) as caught:
        await world.call(prompt=[5] * 40000)
    assert (caught.value.kind, caught.value.prompt_tokens) == ("context_length", 40000)


async def test_a_stream_that_is_cut_is_unavailable(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, cut_after=2)], route)
    with pytest.raises(EngineError, match=world.url) as caught:
        await world.call()
    assert caught.value.kind == "unavailable"


async def test_closing_the_iterator_ends_the_generation(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, hold_after=2)], route)
    stream = world.engine.generate(ids(PROMPT), Sampling(), stop_ids=STOP, request_id="r", affinity="s")
    await anext(stream)
    await stream.aclose()
    await world.model.log.wait_for(lambda generations: generations[0].ended == "cancelled")


async def test_cancelling_the_reader_ends_the_generation(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text=WORDS, hold_after=2)], route)
    calling = asyncio.create_task(world.call())
    await world.model.log.wait_for(lambda generations: len(generations) == 1 and len(generations[0].sampled_ids) == 2)
    calling.cancel()
    await world.model.log.wait_for(lambda generations: generations[0].ended == "cancelled")
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_two_hundred_calls_run_at_a_time(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text="Paris", hold_after=0)], route)
    calls = [asyncio.create_task(world.call()) for _ in range(200)]
    await world.model.log.wait_for(lambda generations: len(generations) == 200)
    world.model.release()
    assert len(await asyncio.gather(*calls)) == 200


async def test_calls_over_the_limit_wait_and_are_counted(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text="Paris", hold_after=0)], route, max_inflight=2)
    calls = [asyncio.create_task(world.call()) for _ in range(5)]
    await world.model.log.wait_for(lambda generations: len(generations) == 2)
    assert world.engine.waiting == 3
    world.model.release()
    await asyncio.gather(*calls)
    assert world.engine.waiting == 0


async def test_calls_in_a_row_share_a_connection(bench: MakeBench) -> None:
    async with wire_server(*[GOOD] * 3) as wire, unasked(wire.url, (await bench([])).engine) as engine:
        for _ in range(3):
            assert sampled(await all_of(engine)) == [5, 2]
        assert wire.connections == 1


async def test_a_kept_connection_that_dies_before_the_first_byte_is_tried_once_more(bench: MakeBench) -> None:
    dead = Reply(raw=b"")
    async with wire_server(GOOD, dead, GOOD) as wire, unasked(wire.url, (await bench([])).engine) as engine:
        for _ in range(2):
            assert sampled(await all_of(engine)) == [5, 2]
        assert len(wire.bodies) == 3
        assert wire.bodies[1] == wire.bodies[2]
        assert wire.connections == 2


async def test_once_a_byte_has_come_nothing_is_tried_again(bench: MakeBench) -> None:
    begun = Reply(raw=b"HTTP/1.1 200 OK\r\nContent-")
    async with wire_server(GOOD, begun, GOOD) as wire, unasked(wire.url, (await bench([])).engine) as engine:
        await all_of(engine)
        with pytest.raises(EngineError) as caught:
            await all_of(engine)
        assert caught.value.kind == "unavailable"
        assert len(wire.bodies) == 2


async def test_a_schema_goes_where_the_route_has_its_grammar(bench: MakeBench, route: str) -> None:
    world = await bench([Step(text="{}")], route)
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    for form, meant in (
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}, schema),
        ({"type": "json_object"}, {"type": "object"}),
        (None, None),
    ):
        stream = world.engine.generate(
            ids(PROMPT), Sampling(), stop_ids=STOP, request_id="r", affinity="s", response_format=form
        )
        assert [chunk async for chunk in stream][-1].finish_reason == "stop"
        body = world.model.log.generations[-1].request
        held = (body["sampling_params"] if route == GENERATE else body).get("structured_outputs")
        assert held == (None if meant is None else {"json": meant})
