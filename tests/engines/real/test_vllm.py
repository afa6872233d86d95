"""A real vLLM behind a real gateway: sessions are exact by every way there is to talk to it, and what was captured is
what the engine itself says when it is asked again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.engines.probing import probe
from polar.engines.vllm import VLLMEngine
from polar.engines.vllm_wire import COMPLETIONS, GENERATE
from polar.engines.weights import UpdateMode, update_weights
from tests.engines.real.conftest import MakeWorld, World
from tests.engines.real.scoring import CLOSE, response_scores

pytestmark = [pytest.mark.real, pytest.mark.slow]


@asynccontextmanager
async def without(url: str, *paths: str) -> AsyncIterator[str]:
    """The server with some paths refused, as vLLM refuses those that it was not started with."""

    async def forward(request: web.Request) -> web.StreamResponse:
        if request.path in paths:
            return web.json_response({"error": {"message": "disabled", "code": 403}}, status=403)
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        async with session.request(request.method, url + request.path_qs, data=body, headers=headers) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            return response

    async with aiohttp.ClientSession() as session:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def talk(world: World, turns: int, *, stream: bool = True, **options: Any) -> None:
    """A conversation of several turns, as a harness has it."""
    messages: list[Any] = [{"role": "user", "content": "Tell me a story about a polar bear."}]
    asked: dict[str, Any] = {"model": "any", "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, **options}
    async with world.client() as client:
        for turn in range(turns):
            if stream:
                pieces = await client.chat.completions.create(messages=messages, stream=True, **asked)
                said = "".join([p.choices[0].delta.content or "" async for p in pieces if p.choices])
            else:
                reply = await client.chat.completions.create(messages=messages, **asked)
                said = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Go on, part {turn}."}]


async def check_exact(url: str, world: World, way: str) -> list[Completion]:
    """Every trained token stands behind the ids that it was sampled behind: scoring it there gives its logprob."""
    completions, trajectory = await world.completions(), await world.trajectory()
    assert {each.outcome for each in completions} == {"ok"}
    assert sum(sum(trace.loss_mask) for trace in trajectory.traces) == sum(len(c.response_ids) for c in completions)
    furthest = 0.0
    for trace in trajectory.traces:
        mask = np.array(trace.loss_mask, dtype=bool)
        off = np.abs(await response_scores(url, "vllm", trace) - np.array(trace.response_logprobs))[mask]
        furthest = max(furthest, float(off.max()))
    print(f"{way}: {len(completions)} calls, {len(trajectory.traces)} traces, logprobs within {furthest:.1e}")
    assert furthest < CLOSE
    return completions


async def running_calls(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


async def until_idle(url: str) -> None:
    async with asyncio.timeout(10):
        while await running_calls(url):
            await asyncio.sleep(0.1)


async def test_probing_finds_everything(vllm: str, weights: Path) -> None:
    found = await probe(vllm)
    assert (found.kind, found.model, found.context_length) == ("vllm", "smollm2", 8192)
    assert (found.token_route, found.chat_ids, found.weight_versions) == (GENERATE, True, True)
    assert (found.renders, found.weight_updates, found.prefix_caching) == (True, True, True)
    assert (found.logprobs, found.structured_outputs, found.images) == ("raw", True, False)
    assert [lack.what for lack in found.missing] == ["logprobs of the distribution that is sampled from"]
    engine = VLLMEngine(vllm)
    await engine.start()
    await engine.close()
    assert engine.info.model_path == str(weights)


async def test_a_session_by_generate_is_one_exact_trace(vllm: str, gateway: MakeWorld) -> None:
    world = await gateway(VLLMEngine(vllm))
    await talk(world, 4)
    completions = await check_exact(vllm, world, "generate")
    assert {c.mode for c in completions} == {"tito"}
    assert all([s.version for s in c.weight_spans] == ["default"] for c in completions)
    assert len((await world.trajectory()).traces) == 1


async def test_a_session_by_completions_is_one_exact_trace(vllm: str, gateway: MakeWorld) -> None:
    async with without(vllm, GENERATE) as url:
        engine = VLLMEngine(url)
        world = await gateway(engine)
        assert engine.capabilities.token_route == COMPLETIONS
        await talk(world, 4)
        completions = await check_exact(vllm, world, "completions")
    assert {c.mode for c in completions} == {"tito"}
    assert len((await world.trajectory()).traces) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_session_in_chat_mode_is_exact(vllm: str, gateway: MakeWorld, stream: bool) -> None:
    world = await gateway(VLLMEngine(vllm, mode="chat"))
    await talk(world, 3, stream=stream)
    completions = await check_exact(vllm, world, f"chat, stream {stream}")
    assert {c.mode for c in completions} == {"chat"}


async def test_a_session_rendered_by_the_engine_is_exact(
    vllm: str, gateway: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine without the model.
    monkeypatch.setattr("polar.engines.token_server.tokenizer_folder", lambda _: None)
    world = await gateway(VLLMEngine(vllm))
    await talk(world, 3)
    completions = await check_exact(vllm, world, "render route")
    assert {c.mode for c in completions} == {"tito"}
    assert not any("<|im_end|>" in str(c.reply.content) for c in completions)
    await talk(world, 1, stop=["bear", "the", "a"], max_tokens=200)
    (*_, last) = await world.completions()
    assert last.stop_sequence in ("bear", "the", "a")
    assert last.stop_sequence not in str(last.reply.content)


async def test_a_schema_holds_a_reply_that_is_sampled_from_ids(vllm: str, gateway: MakeWorld) -> None:
    world = await gateway(VLLMEngine(vllm))
    schema = {"type": "string", "enum": ["polar", "brown"]}  # no place for the blank lines that a small model loves
    form = {"type": "json_schema", "json_schema": {"name": "bear", "schema": schema}}
    await talk(world, 1, stream=False, max_tokens=40, response_format=form)
    (call,) = await world.completions()
    assert call.mode == "tito"
    assert json.loads(str(call.reply.content)) in ("polar", "brown")
    assert call.metadata["logprobs"] == "masked"


async def test_a_stop_string_leaves_the_weights_known(vllm: str, gateway: MakeWorld) -> None:
    world = await gateway(VLLMEngine(vllm))
    await talk(world, 1, stop=["bear", "the", "a"], max_tokens=200)
    (call,) = await world.completions()
    assert call.stop_sequence in ("bear", "the", "a")
    assert [(s.start, s.end) for s in call.weight_spans] == [(0, len(call.response_ids))]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_client_that_goes_away_frees_the_slot(vllm: str, gateway: MakeWorld, mode: Any) -> None:
    world = await gateway(VLLMEngine(vllm, mode=mode))
    world.node.gateway._grace = 0.0
    async with world.client() as client:
        pieces = await client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "Count."}], max_tokens=1500, stream=True
        )
        async for piece in pieces:
            if piece.choices and piece.choices[0].delta.content:
                break
        assert await running_calls(vllm) == 1
        await pieces.close()
    await until_idle(vllm)
    (call,) = await world.completions()
    assert call.outcome == "abandoned"


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_new_weights_in_the_middle_of_a_reply(
    vllm: str, weights: Path, other_weights: Path, gateway: MakeWorld, mode: UpdateMode
) -> None:
    world = await gateway(VLLMEngine(vllm))
    try:
        asking = asyncio.create_task(talk(world, 2, max_tokens=48, logit_bias={"2": -100}))
        await sampling_began(world)
        await update_weights(vllm, "vllm", other_weights, "step-1", mode=mode)
        await asking
        first, second = await world.completions()
        assert first.outcome == second.outcome == "ok"
        assert len(first.response_ids) == 48
        assert [s.version for s in first.weight_spans] == ["default", "step-1"]
        before, after = first.weight_spans
        assert (before.start, before.end, after.end) == (0, after.start, 48)
        assert 0 < before.end < 48
        assert [s.version for s in second.weight_spans] == ["step-1"]
        # Scored under the new weights: only what was sampled under the old ones is off.
        (trace,) = (await world.trajectory()).traces
        off = np.abs(await response_scores(vllm, "vllm", trace) - np.array(trace.response_logprobs))
        old, new = off[: before.end].max(), off[after.start : after.end].max()
        print(f"{mode}: {before.end} tokens under the old weights, off by {old:.2f}; the others by {new:.1e}")
        assert old > 10 * CLOSE
        assert new < CLOSE
    finally:
        await update_weights(vllm, "vllm", weights, "default", mode="abort")


async def sampling_began(world: World) -> None:
    async with asyncio.timeout(60):
        while not any(len(call.deltas) >= 8 for call in world.session.calls):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("stops", [frozenset({2}), frozenset({0, 2})])
async def test_the_id_that_ends_a_reply_is_its_last_one(vllm: str, stops: frozenset[int]) -> None:
    engine = VLLMEngine(vllm)
    await engine.start()
    try:
        for end in stops:
            sampling = Sampling(max_tokens=8, logit_bias={end: 100.0})
            reply = engine.generate(ids([1, 4093, 198]), sampling, stop_ids=stops, request_id="r", affinity="s")
            chunks = [chunk async for chunk in reply]
            assert [token for chunk in chunks for token in chunk.ids] == [end]
            assert (chunks[-1].finish_reason, chunks[-1].stop_sequence) == ("stop", None)
    finally:
        await engine.close()


async def test_waiting_lets_calls_end_under_the_old_weights(vllm: str, weights: Path, other_weights: Path) -> None:
    engine = VLLMEngine(vllm)
    await engine.start()
    try:
        stream = engine.generate(
            ids([1, 4093, 198]),
            Sampling(max_tokens=60, logit_bias={2: -100.0}),
            stop_ids=frozenset({2}),
            request_id="r",
            affinity="s",
        )
        await anext(stream)
        updating = asyncio.create_task(update_weights(vllm, "vllm", other_weights, "step-1", mode="wait"))
        chunks = [chunk async for chunk in stream]
        await updating
        assert [(s.version, s.end) for s in chunks[-1].weight_spans] == [("default", 60)]
    finally:
        await update_weights(vllm, "vllm", weights, "default", mode="abort")
        await engine.close()


async def test_a_folder_that_is_not_there_never_reaches_the_engine(vllm: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder with weights"):
        await update_weights(vllm, "vllm", tmp_path / "none", "step-1")
    assert await running_calls(vllm) == 0
