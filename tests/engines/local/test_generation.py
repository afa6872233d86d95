"""The embedded engine as a caller sees it: the same reply whatever else runs, exact logprobs, clean ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from polar.contract.arrays import NO_IDS, ids
from polar.contract.chat import Sampling
from polar.engines.base import EngineError, TokenEngine
from polar.engines.local import LocalEngine
from polar.engines.local.packed import PackedModel

from .calls import Reply, call, prompt_of, scored
from .conftest import StartEngine

close = pytest.approx


async def test_it_is_a_token_engine_and_says_what_it_serves(start: StartEngine, tiny: Path) -> None:
    engine = await start()
    assert isinstance(engine, TokenEngine)
    assert (engine.info.kind, engine.info.model, engine.info.model_path) == ("local", "tiny", str(tiny))
    assert engine.info.context_length == 256


async def test_many_calls_at_once_give_what_each_gives_alone(start: StartEngine) -> None:
    together, alone = await start(max_running=5), await start(max_running=1)
    jobs = [
        (prompt_of(5 + 7 * n, seed=n), {"seed": n, "max_tokens": 6 + n % 5, "temperature": 0.8}) for n in range(14)
    ]
    batch = await asyncio.gather(*(call(together, prompt, **options) for prompt, options in jobs))
    for (prompt, options), reply in zip(jobs, batch, strict=True):
        single = await call(alone, prompt, **options)
        assert reply.ids == single.ids
        assert reply.logprobs == close(single.logprobs, abs=1e-4)
        assert len(reply.ids) == options["max_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
async def test_captured_logprobs_are_what_one_pass_over_the_sequence_gives(
    start: StartEngine, temperature: float
) -> None:
    engine, prompt = await start(), prompt_of(40)
    reply = await call(engine, prompt, temperature=temperature, max_tokens=30, seed=3)
    assert reply.logprobs == close(await scored(engine, prompt, reply, temperature or 1.0), abs=1e-4)


async def test_logprobs_are_those_before_bias_penalties_and_truncation(start: StartEngine) -> None:
    engine, prompt = await start(), prompt_of(20)
    reply = await call(
        engine, prompt, max_tokens=20, seed=1, top_k=5, top_p=0.7, frequency_penalty=1.0, logit_bias={3: 4.0}
    )
    assert reply.logprobs == close(await scored(engine, prompt, reply), abs=1e-4)


async def test_a_stop_id_is_part_of_the_reply_and_ends_it(start: StartEngine) -> None:
    engine, prompt = await start(), prompt_of(20)
    whole = await call(engine, prompt, seed=5, max_tokens=20)
    stopped = await call(engine, prompt, seed=5, max_tokens=20, stop_ids=[whole.ids[7]])
    cut = whole.ids.index(whole.ids[7]) + 1
    assert stopped.ids == whole.ids[:cut]
    assert (stopped.finish_reason, whole.finish_reason) == ("stop", "length")


async def test_without_max_tokens_a_reply_goes_on_to_the_end_of_the_context(start: StartEngine) -> None:
    engine = await start(context_length=64)
    for options in ({}, {"max_tokens": 1000}):
        reply = await call(engine, prompt_of(50), **options)
        assert (len(reply.ids), reply.finish_reason) == (14, "length")


async def test_a_prompt_that_fills_the_context_is_refused(start: StartEngine) -> None:
    engine = await start()
    with pytest.raises(EngineError, match="300 tokens, and the model's context is 256") as caught:
        await call(engine, prompt_of(300))
    assert caught.value.kind == "context_length"
    with pytest.raises(EngineError, match="context is 256"):
        await call(engine, prompt_of(256))
    with pytest.raises(EngineError, match="context is 256"):
        await engine.score(prompt_of(257))


@pytest.mark.parametrize("prompt", [NO_IDS, ids([1, 97]), ids([-1])])
async def test_a_prompt_without_tokens_or_with_unknown_ones_is_refused(start: StartEngine, prompt: list[int]) -> None:
    with pytest.raises(EngineError) as caught:
        await call(await start(), prompt)
    assert caught.value.kind == "bad_request"


async def test_closing_the_iterator_frees_the_slot(start: StartEngine) -> None:
    engine = await start(max_running=1)
    stream = engine.generate(prompt_of(10), Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    await anext(stream)
    waiting = asyncio.create_task(call(engine, prompt_of(8, seed=1), max_tokens=3))
    await stream.aclose()
    assert len((await waiting).ids) == 3


async def test_a_call_that_is_closed_while_it_waits_never_runs(start: StartEngine) -> None:
    engine = await start(max_running=1)
    running = engine.generate(prompt_of(10), Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    await anext(running)
    waiting = asyncio.create_task(call(engine, prompt_of(8, seed=1)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await running.aclose()
    assert len((await call(engine, prompt_of(8, seed=1), max_tokens=2)).ids) == 2


async def test_closing_the_engine_ends_running_and_waiting_calls(start: StartEngine) -> None:
    engine = await start(max_running=1, context_length=256)
    stream = engine.generate(prompt_of(10), Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    await anext(stream)
    waiting = asyncio.create_task(call(engine, prompt_of(8, seed=1)))
    await asyncio.sleep(0)
    await engine.close()
    await engine.close()
    assert [chunk.finish_reason async for chunk in stream][-1] in ("abort", "length")
    assert (await waiting).finish_reason in ("abort", "length")
    with pytest.raises(EngineError) as caught:
        await call(engine, prompt_of(5))
    assert caught.value.kind == "unavailable"


async def test_a_crash_in_the_thread_reaches_every_call(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(max_running=2)

    def crash(*_: object) -> None:
        raise RuntimeError("the disk\nis on fire")

    monkeypatch.setattr(PackedModel, "hidden", crash)
    replies = await asyncio.gather(*(call(engine, prompt_of(9, seed=n)) for n in range(4)), return_exceptions=True)
    replies.append((await asyncio.gather(call(engine, prompt_of(3)), return_exceptions=True))[0])
    replies.append((await asyncio.gather(engine.score(prompt_of(3)), return_exceptions=True))[0])
    for error in replies:
        assert isinstance(error, EngineError)
        assert error.kind == "internal"
        assert "the disk" in str(error)
        assert "\n" not in str(error)


async def test_weights_that_give_no_numbers_end_the_call_with_an_error(start: StartEngine, tiny: Path) -> None:
    from polar.engines.local.model import CausalLM

    engine = await start()
    broken = CausalLM.load(tiny).state_dict()
    broken["model.norm.weight"] = broken["model.norm.weight"] * float("nan")
    await engine.load_weights(broken, "broken")
    with pytest.raises(EngineError, match="not finite"):
        await call(engine, prompt_of(5))


async def test_before_start_it_says_so(tiny: Path) -> None:
    engine = LocalEngine(tiny)
    with pytest.raises(EngineError, match="has not been started"):
        _ = engine.info
    await engine.close()


async def test_a_long_prompt_does_not_stop_others(start: StartEngine, tmp_path: Path) -> None:
    from .conftest import write_tiny

    engine = await start(write_tiny(tmp_path / "long", max_position_embeddings=4096), max_running=4)
    short = engine.generate(prompt_of(6), Sampling(), stop_ids=frozenset(), request_id="r", affinity="s")
    await anext(short)
    long = asyncio.create_task(call(engine, prompt_of(2000, seed=2), max_tokens=1))
    tokens = 0
    while not long.done():
        await anext(short)
        tokens += 1
    await short.aclose()
    assert tokens >= 2000 // 128 - 1
    assert (await long).finish_reason == "length"


async def test_calls_that_do_not_fit_into_memory_wait_for_each_other(start: StartEngine) -> None:
    engine = await start(kv_tokens=50)
    replies: list[Reply] = await asyncio.gather(
        *(call(engine, prompt_of(20, seed=n), max_tokens=20, seed=n) for n in range(4))
    )
    assert [len(reply.ids) for reply in replies] == [20] * 4
    alone = await call(engine, prompt_of(100), max_tokens=5)
    assert len(alone.ids) == 5


async def test_score_begins_with_zero_and_sums_up_probabilities(start: StartEngine) -> None:
    engine = await start()
    scores = np.array([(await engine.score(ids([5, token])))[1] for token in range(97)])
    assert np.exp(scores).sum() == close(1.0, abs=1e-4)
    assert (await engine.score(ids([5])))[0] == 0.0
