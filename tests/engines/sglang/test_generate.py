"""The scripted SGLang against the client: what it meant is what we read, in either kind of stream, through every
fault it can have."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from pathlib import Path

import pytest

from polar.capture.verify import judge
from polar.contract.arrays import floats, ids
from polar.contract.chat import Message, Sampling
from polar.contract.completion import WeightSpan
from polar.engines.base import EngineError, TokenEngine
from tests.engines.sglang.conftest import EOS, PROMPT, Start, call, generate, logprobs, sampled
from tests.support import oracle
from tests.support.script import Step
from tests.support.scripted_sglang import scripted_sglang

CALL = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 15, "b": 27}}\n</tool_call>'


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("incremental", [False, True])
async def test_what_we_read_is_what_the_engine_meant(
    incremental: bool, chunk_tokens: int, start: Start, model_dir: Path
) -> None:
    steps = [Step(text=CALL, chunk_tokens=chunk_tokens)]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        client = await start(engine.url)
        assert isinstance(client, TokenEngine)
        chunks = await call(client)
        (meant,) = engine.model.log.generations
    assert meant.context_ids == list(PROMPT)
    assert sampled(chunks) == meant.sampled_ids
    assert sampled(chunks)[-1] == EOS, "the id that ended the reply is part of it"
    assert logprobs(chunks) == meant.logprobs == oracle.logprobs(PROMPT, meant.sampled_ids)
    last = chunks[-1]
    assert last.finish_reason == "stop"
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(PROMPT), len(meant.sampled_ids))
    assert last.weight_spans == [WeightSpan("default", 0, len(meant.sampled_ids))]


async def test_the_words_repeated_in_a_reply_are_counted_once(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(ids=(50,) * 9)]) as engine:
        chunks = await call(await start(engine.url))
    assert sampled(chunks) == [50] * 9 + [EOS]
    assert logprobs(chunks) == oracle.logprobs(PROMPT, [50] * 9 + [EOS])


@pytest.mark.parametrize("incremental", [False, True])
async def test_an_update_in_the_middle_is_known_to_the_token(
    incremental: bool, start: Start, model_dir: Path
) -> None:
    steps = [Step(ids=tuple(range(40, 50)), hold_after=4)]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        reply = generate(await start(engine.url))
        chunks = [await anext(reply)]
        while len(sampled(chunks)) < 4:
            chunks.append(await anext(reply))
        engine.model.weight_version = "step-1"
        engine.model.release()
        chunks += [chunk async for chunk in reply]
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.ids]
    assert versions == ["default"] * 4 + ["step-1"] * 7
    assert chunks[-1].weight_spans == [WeightSpan("default", 0, 4), WeightSpan("step-1", 4, 11)]


async def test_a_limit_ends_a_reply(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(ids=tuple(range(40, 50)))]) as engine:
        chunks = await call(await start(engine.url), Sampling(max_tokens=3))
    assert sampled(chunks) == [40, 41, 42]
    assert chunks[-1].finish_reason == "length"


async def test_a_stop_string_ends_a_reply_with_the_tokens_it_is_in(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="The capital of France is Paris.")]) as engine:
        chunks = await call(await start(engine.url), Sampling(max_tokens=50, stop=("France",)))
        (meant,) = engine.model.log.generations
    assert sampled(chunks) == meant.sampled_ids
    assert (chunks[-1].finish_reason, chunks[-1].stop_sequence) == ("stop", "France")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("fault", ["omit", "null", "nan", "inf", "sentinel", "bool"])
async def test_a_logprob_that_is_none_serves_and_does_not_train(
    fault: str, incremental: bool, start: Start, model_dir: Path
) -> None:
    steps = [Step(ids=(40, 41, 42), logprobs=fault)]  # type: ignore[arg-type]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        chunks = await call(await start(engine.url))
    assert sampled(chunks) == [40, 41, 42, EOS]
    assert len(logprobs(chunks)) == 4
    outcome, _ = judge(
        message=Message("assistant", "x"),
        prompt_ids=ids(PROMPT),
        response_ids=ids(sampled(chunks)),
        logprobs=floats(logprobs(chunks)),
        finish_reason="stop",
        usage=chunks[-1].usage,
    )
    assert outcome == "logprob_missing"
    if fault != "omit":
        assert logprobs(chunks)[:-1] == oracle.logprobs(PROMPT, [40, 41, 42])
    assert fault == "sentinel" or not math.isfinite(logprobs(chunks)[-1])


@pytest.mark.parametrize("stripped", [["meta_info"], ["meta_info", "output_ids"]])
async def test_a_router_that_strips_what_we_need_is_found_at_the_start(
    stripped: list[str], start: Start, model_dir: Path
) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")], stripped=stripped) as engine:
        client = await start(engine.url)
        assert "token ids" in client.info.chat_only
        assert "past a router" in client.info.chat_only
        with pytest.raises(EngineError, match="meta_info") as caught:
            await call(client)
    assert caught.value.kind == "no_token_ids"
    assert f"{engine.url}/generate" in str(caught.value)


async def test_a_reply_without_ids_names_the_field(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi", omit_token_ids=True)]) as engine:
        client = await start(engine.url)
        with pytest.raises(EngineError, match="output_ids") as caught:
            await call(client)
    assert caught.value.kind == "no_token_ids"
    assert f"{engine.url}/generate" in str(caught.value)


async def test_ids_are_taken_from_the_logprobs_where_they_stand_nowhere_else(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(ids=(40, 41))], stripped=["output_ids"]) as engine:
        chunks = await call(await start(engine.url))
    assert sampled(chunks) == [40, 41, EOS]
    assert logprobs(chunks) == oracle.logprobs(PROMPT, [40, 41, EOS])


@pytest.mark.parametrize("incremental", [False, True])
async def test_fewer_ids_than_it_counts_are_passed_on_in_doubt(
    incremental: bool, start: Start, model_dir: Path
) -> None:
    """A1: what is there is served, each once; what is not is said with the first chunk that shows it."""
    steps = [Step(ids=(40, 41), usage_extra=2)]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        chunks = await call(await start(engine.url))
    assert sampled(chunks) == [40, 41, EOS]
    assert {chunk.doubt is None for chunk in chunks} == {False}
    assert "counts 3 tokens, and of these sent 0 earlier and 1 now" in (chunks[0].doubt or "")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


@pytest.mark.parametrize("incremental", [False, True])
async def test_more_ids_than_it_counts_are_in_doubt(incremental: bool, start: Start, model_dir: Path) -> None:
    steps = [Step(ids=(40, 41), usage_extra=-1)]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        chunks = await call(await start(engine.url))
    assert sampled(chunks) == [40, 41, EOS]
    assert chunks[-1].doubt is not None


async def test_an_abort_at_the_engine_keeps_what_was_sampled(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(ids=(40, 41, 42, 43), hold_after=2)]) as engine:
        client = await start(engine.url)
        reply = generate(client)
        chunks = [await anext(reply), await anext(reply)]
        rid = engine.model.log.generations[0].request["rid"]
        await client._upstream.ask("/abort_request", {"rid": rid})
        chunks += [chunk async for chunk in reply]
    assert sampled(chunks) == [40, 41]
    assert chunks[-1].finish_reason == "abort"
    assert chunks[-1].weight_spans == [WeightSpan("default", 0, 2)]


@pytest.mark.parametrize("incremental", [False, True])
async def test_closing_a_call_closes_its_connection_and_says_so(
    incremental: bool, start: Start, model_dir: Path
) -> None:
    steps = [Step(ids=(40, 41, 42), hold_after=1, hold="never")]
    async with scripted_sglang(model_dir, steps, incremental=incremental) as engine:
        client = await start(engine.url)
        async with aclosing(generate(client, request_id="mine")) as reply:
            assert (await anext(reply)).ids == [40]
        log = engine.model.log
        await log.wait_for(lambda g: g[0].ended != "running" and bool(engine.server.aborted))
        (generation,) = log.generations
        assert generation.ended in ("cancelled", "done")
        assert generation.sampled_ids == [40]
        assert engine.server.aborted == [generation.request["rid"]]


async def test_a_call_whose_reader_is_cancelled_before_the_first_token_is_aborted(
    start: Start, model_dir: Path
) -> None:
    async with scripted_sglang(model_dir, [Step(ids=(40,), hold_after=0, hold="never")]) as engine:
        client = await start(engine.url)
        task = asyncio.create_task(call(client))
        await engine.model.log.wait_for(lambda g: len(g) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.model.log.wait_for(lambda g: g[0].ended != "running" and bool(engine.server.aborted))


async def test_a_call_that_ended_is_not_aborted_and_names_are_never_used_twice(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")]) as engine:
        client = await start(engine.url)
        for request_id in ("a", "a", "ab"):
            await call(client, request_id=request_id)
        rids = [g.request["rid"] for g in engine.model.log.generations]
        assert not engine.server.aborted
    assert [rid.partition("-")[2] for rid in rids] == ["a", "a", "ab"]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)
    assert len(set(rids)) == 3


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "bad_request"), (429, "overloaded"), (503, "overloaded"), (500, "unavailable"), (502, "unavailable")],
)
async def test_an_error_keeps_its_kind(status: int, kind: str, start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(status=status, error="the engine's words")]) as engine:
        client = await start(engine.url)
        with pytest.raises(EngineError, match="the engine's words") as caught:
            await call(client)
    assert (caught.value.kind, caught.value.status) == (kind, status)


async def test_an_error_in_the_middle_of_a_stream(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="some words here", error_after=2, error="out of memory")]) as e:
        client = await start(e.url)
        with pytest.raises(EngineError, match="out of memory") as caught:
            await call(client)
    assert caught.value.kind == "unavailable"


async def test_a_connection_cut_in_the_middle(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="some words here", cut_after=2)]) as engine:
        client = await start(engine.url)
        with pytest.raises(EngineError, match="connection failed") as caught:
            await call(client)
    assert caught.value.kind == "unavailable"


async def test_a_prompt_that_fills_the_context_is_told_with_numbers(start: Start, model_dir: Path) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")], max_model_len=8) as engine:
        client = await start(engine.url)
        with pytest.raises(EngineError) as caught:
            await call(client, prompt=range(10, 18))
        error = caught.value
        assert (error.kind, error.prompt_tokens, error.context_length) == ("context_length", 8, 8)
        assert len(sampled(await call(client, prompt=range(10, 16)))) == 2


async def test_calls_wait_for_their_turn_where_there_is_a_limit_and_only_there(start: Start, model_dir: Path) -> None:
    steps = [Step(ids=(40,), hold_after=0)]
    async with scripted_sglang(model_dir, steps) as engine:
        bounded, free = await start(engine.url, max_inflight=2), await start(engine.url)
        tasks = [asyncio.create_task(call(bounded)) for _ in range(5)]
        await engine.model.log.wait_for(lambda g: len(g) == 2)
        assert bounded.waiting == 3
        tasks += [asyncio.create_task(call(free)) for _ in range(150)]
        await engine.model.log.wait_for(lambda g: len(g) == 152)
        engine.model.release()
        assert [sampled(chunks) for chunks in await asyncio.gather(*tasks)] == [[40, EOS]] * 155
