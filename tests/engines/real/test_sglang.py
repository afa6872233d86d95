"""A real SGLang: its ids are exact over a session, its logprobs are its own, what is left is freed, and an update in
the middle is known to the token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Chat, Message, Sampling
from polar.contract.errors import UsageError
from polar.engines.base import EngineError
from polar.engines.openai import OpenAIEngine
from polar.engines.probing import probe
from polar.engines.sglang import SGLangEngine
from polar.engines.sglang_server import workers_behind
from polar.engines.weights import update_weights
from tests.engines.real.conftest import MakeWorld
from tests.engines.real.scoring import CLOSE, ask, by_sglang
from tests.engines.real.session import TURNS, hold, trained, whole

pytestmark = [pytest.mark.real, pytest.mark.slow]
TOKENS = 40
STOP = frozenset({2})
PROMPT = ids([1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198])
LONG = Sampling(temperature=1.0, max_tokens=400, logit_bias={2: -100.0})
"""A reply that goes on until it is ended."""


def running(url: str) -> int:
    """Calls that hold a slot or wait for one."""
    return sum(rank["num_running_reqs"] + rank["num_waiting_reqs"] for rank in ask(url, "/v1/loads")["loads"])


async def until_idle(url: str, seconds: float) -> float:
    """How long it takes until no call is there.

    Raises:
        TimeoutError: longer than ``seconds``.
    """
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while await asyncio.to_thread(running, url):
            await asyncio.sleep(0.05)
    return time.monotonic() - began


def generate(engine: SGLangEngine, sampling: Sampling) -> Any:
    return engine.generate(PROMPT, sampling, stop_ids=STOP, request_id="req", affinity="session")


@pytest.fixture
async def engine(sglang: str) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(sglang)
    await engine.start()
    yield engine
    await engine.close()


async def test_what_it_can_do(sglang: str, weights: Path, engine: SGLangEngine) -> None:
    found = await probe(sglang)
    assert (found.kind, found.token_route, found.context_length) == ("sglang", "/generate", 8192)
    assert (found.weight_versions, found.weight_updates, found.structured_outputs) == (True, True, True)
    assert (found.logprobs, found.prefix_caching, found.images, found.chat_ids) == ("temperature", True, False, True)
    assert found.missing == ()
    assert (engine.info.model_path, engine.info.chat_only) == (str(weights), None)


async def test_a_look_is_answered_while_it_samples_and_while_it_is_paused(sglang: str, engine: SGLangEngine) -> None:
    async with aclosing(generate(engine, LONG)) as reply:
        await anext(reply)
        await engine.check()
        await asyncio.to_thread(ask, sglang, "/pause_generation", {"mode": "in_place"})
        try:
            await engine.check()
        finally:
            await asyncio.to_thread(ask, sglang, "/continue_generation", {})
        await anext(reply)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_by_token_ids_is_one_exact_trace(sglang: str, stream: bool, gateway: MakeWorld) -> None:
    world = await gateway(SGLangEngine(sglang, mode="tito"))
    await hold(world, temperature=1.0, stream=stream)
    (trace,) = (await world.trajectory()).traces
    assert len(trace.completion_ids) == len(TURNS)
    assert set(trace.weight_versions[trace.loss_mask == 1].tolist()) != {-1}
    own = np.array(by_sglang(sglang, whole(trace)), dtype=np.float64)[len(trace.prompt_ids) :]
    worst = float(np.abs(own - trace.response_logprobs)[trace.loss_mask == 1].max())
    print(f"\nlargest difference of a logprob: {worst:.2e}")
    assert worst < CLOSE


async def test_a_session_by_chat_has_the_ids_and_logprobs_of_the_engine(sglang: str, gateway: MakeWorld) -> None:
    world = await gateway(SGLangEngine(sglang, mode="chat"))
    await hold(world, temperature=1.0)
    completions = await world.completions()
    assert [(each.outcome, each.mode) for each in completions] == [("ok", "chat")] * len(TURNS)
    trajectory = await world.trajectory()
    assert sum(len(trace.completion_ids) for trace in trajectory.traces) == len(TURNS)
    for trace in trajectory.traces:
        own = np.array(by_sglang(sglang, whole(trace)), dtype=np.float64)[trained(trace)]
        assert np.abs(own - trace.response_logprobs[trace.loss_mask == 1]).max() < CLOSE


async def test_logprobs_have_the_temperature_applied(sglang: str, engine: SGLangEngine) -> None:
    hot = [chunk async for chunk in generate(engine, Sampling(temperature=2.0, max_tokens=12, seed=1))]
    cold = by_sglang(sglang, [*PROMPT.tolist(), *(token for chunk in hot for token in chunk.ids)])[len(PROMPT) :]
    found = [value for chunk in hot for value in chunk.logprobs]
    assert max(abs(a - (b or 0.0)) for a, b in zip(found, cold, strict=True)) > 0.2


@pytest.mark.parametrize("events", [0, 3])
async def test_a_call_that_is_left_frees_its_slot(sglang: str, engine: SGLangEngine, events: int) -> None:
    async with aclosing(generate(engine, LONG)) as reply:
        first = asyncio.create_task(anext(reply))
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(running, sglang):
                await asyncio.sleep(0.01)
        if events:
            await first
            for _ in range(events - 1):
                await anext(reply)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    seconds = await until_idle(sglang, 10.0)
    print(f"\nfree after {seconds:.2f} s")


async def test_an_abort_at_the_engine_is_told_with_what_was_sampled(sglang: str, engine: SGLangEngine) -> None:
    reply = generate(engine, LONG)
    chunks = [await anext(reply)]
    await asyncio.to_thread(ask, sglang, "/abort_request", {"abort_all": True, "rid": ""})
    chunks += [chunk async for chunk in reply]
    assert chunks[-1].finish_reason == "abort"
    sampled = sum(len(chunk.ids) for chunk in chunks)
    assert 0 < sampled < 400
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == sampled


async def test_the_id_that_ends_a_reply_is_its_last_one(engine: SGLangEngine) -> None:
    sampling = Sampling(max_tokens=8, logit_bias={2: 100.0})
    chunks = [chunk async for chunk in generate(engine, sampling)]
    assert [token for chunk in chunks for token in chunk.ids] == [2]
    assert (chunks[-1].finish_reason, chunks[-1].stop_sequence) == ("stop", None)


async def test_a_prompt_that_is_too_long_is_told_as_such(engine: SGLangEngine) -> None:
    for length in (8188, 8192, 9000):
        with pytest.raises(EngineError) as caught:
            async for _ in engine.generate(
                ids([1] * length), Sampling(), stop_ids=STOP, request_id="long", affinity="s"
            ):
                pass
        assert caught.value.kind == "context_length"
        assert caught.value.prompt_tokens == length


@pytest.mark.parametrize("mode", ["keep", "in_place", "abort"])
async def test_new_weights_in_the_middle_of_a_session_are_known_to_the_token(
    mode: Any, sglang: str, weights: Path, other_weights: Path, gateway: MakeWorld
) -> None:
    world = await gateway(SGLangEngine(sglang, mode="tito"))
    await asyncio.to_thread(ask, sglang, "/update_weight_version", {"new_version": "1"})
    try:
        async with world.client() as client:
            body = {"logit_bias": {"2": -100}, "temperature": 1.0, "max_tokens": TOKENS}
            asked = [{"role": "user", "content": "Tell me a story."}]
            stream = await client.chat.completions.create(model="any", messages=asked, stream=True, **body)  # type: ignore[call-overload]
            updating: asyncio.Task[None] | None = None
            async for chunk in stream:
                if updating is None and chunk.choices and chunk.choices[0].delta.content:
                    updating = asyncio.create_task(update_weights(sglang, "sglang", other_weights, "2", mode=mode))
            assert updating is not None
            await updating
        (completion,) = await world.completions()
        (trace,) = (await world.trajectory()).traces
        versions = trace.weight_versions[trace.loss_mask == 1].tolist()
        assert completion.outcome == "ok"
        assert [span.version for span in completion.weight_spans] == ["1", "2"]
        changed = completion.weight_spans[1].start
        assert versions == [1] * changed + [2] * (TOKENS - changed)
        old, new = await _by_either(sglang, whole(trace), weights, other_weights)
        logprobs = trace.response_logprobs.astype(np.float64)
        first = len(trace.prompt_ids)
        assert np.abs(old[first:] - logprobs)[:changed].max() < CLOSE
        assert np.abs(old[first:] - logprobs)[changed:].max() > 1e-1
        if mode != "in_place":
            assert np.abs(new[first:] - logprobs)[changed:].max() < 1e-2
    finally:
        await update_weights(sglang, "sglang", weights, "default", mode="keep")


async def _by_either(url: str, sequence: list[int], old: Path, new: Path) -> list[Any]:
    """A sequence's logprobs under the old and the new weights."""
    found = []
    for folder in (old, new):
        await update_weights(url, "sglang", folder, "scoring", mode="keep")
        found.append(np.array(await asyncio.to_thread(by_sglang, url, sequence), dtype=np.float64))
    return found


async def test_behind_its_own_router_the_server_is_found_and_talked_to(
    sglang: str, sglang_router: str, gateway: MakeWorld
) -> None:
    found = await _workers(sglang_router)
    assert found == [sglang]
    assert await workers_behind(sglang) == [sglang]
    world = await gateway(SGLangEngine(found[0]))
    await hold(world)
    assert [each.outcome for each in await world.completions()] == ["ok"] * len(TURNS)
    with pytest.raises(UsageError, match=f"is a router.*--engine-url {sglang}"):
        await SGLangEngine(sglang_router).start()


async def test_a_chat_through_its_router_is_refused_loudly(sglang_router: str) -> None:
    await _workers(sglang_router)
    engine = OpenAIEngine(sglang_router)
    await engine.start()
    try:
        with pytest.raises(EngineError, match=f"{sglang_router}/v1/chat/completions returned no `choices") as caught:
            async for _ in engine.chat(
                Chat("any", (Message("user", "Hi"),), sampling=Sampling(max_tokens=4)), request_id="r", affinity="s"
            ):
                pass
        assert caught.value.kind == "no_token_ids"
    finally:
        await engine.close()


async def _workers(url: str) -> list[str]:
    """Those behind a router, which listens before it has looked at them."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await workers_behind(url)
            except UsageError as error:
                if "no healthy worker" not in str(error):
                    raise
            await asyncio.sleep(0.5)
