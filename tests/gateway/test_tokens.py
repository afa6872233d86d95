"""Every sampled token is recorded as the engine sampled it, whatever else is asked for and however it comes."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import aiohttp
import openai
import pytest

from polar.contract.chat import Sampling
from polar.contract.errors import PolarError
from polar.contract.task import BuilderSpec
from polar.trajectories.assemble import assemble
from tests.gateway.conftest import World
from tests.support.script import Step

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 15, "b": 27}}\n</tool_call>'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MODES = pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])


async def ask(world: World, messages: list[Any] = MESSAGES, **options: Any) -> Any:
    return await world.client().chat.completions.create(model="m", messages=messages, **options)


@MODES
@pytest.mark.parametrize("tokens", [1, 3, 100])
async def test_a_streamed_tool_call_keeps_every_id_with_its_markup_and_its_end(make_world, mode, tokens) -> None:
    """A1, A13: as sampled, however many tokens come at a time and whatever a parser makes of them."""
    world: World = await make_world([Step(text=CALL, chunk_tokens=tokens)], mode=mode)
    stream = await ask(world, tools=[ADD], stream=True)
    deltas = [call async for chunk in stream for c in chunk.choices for call in c.delta.tool_calls or ()]
    assert "".join(delta.function.arguments or "" for delta in deltas) == '{"a": 15, "b": 27}'
    [completion] = await world.recorded(1)
    [generation] = world.model.log.generations
    assert completion.response_ids.tolist() == generation.sampled_ids
    assert completion.response_ids[-1] == world.model.tokenizer.eos_token_id
    assert world.model.tokenizer.decode(completion.response_ids[:-1]) == CALL
    assert completion.outcome == "ok"


@MODES
@pytest.mark.parametrize("asked", [{"logprobs": True}, {"logprobs": True, "top_logprobs": None}, {"logprobs": False}])
async def test_what_a_client_asks_about_logprobs_changes_nothing_on_record(make_world, mode, asked) -> None:
    """A6."""
    world: World = await make_world([Step(text="Fine.")], mode=mode)
    body = {"model": "m", "messages": MESSAGES, **asked}
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["message"]["content"] == "Fine."
    [completion] = await world.recorded(1)
    [generation] = world.model.log.generations
    assert completion.logprobs.tolist() == generation.logprobs
    assert completion.outcome == "ok"


@MODES
async def test_what_a_harness_says_in_the_models_name_is_context_and_never_trained(make_world, mode) -> None:
    """A10."""
    world: World = await make_world([Step(text="One."), Step(text="Two."), Step(text="Two.")], mode=mode)
    first = await ask(world)
    forged = {"role": "assistant", "content": "I have reached the maximum of turns."}
    history = [*MESSAGES, {"role": "assistant", "content": first.choices[0].message.content}]
    await ask(world, [*history, {"role": "user", "content": "go on"}, forged, {"role": "user", "content": "and?"}])
    completions = await world.recorded(2)
    trajectory = assemble(completions, BuilderSpec())
    trained = [id for trace in trajectory.traces for id in trace.response_ids[trace.loss_mask == 1].tolist()]
    assert trained == [id for generation in world.model.log.generations for id in generation.sampled_ids]
    assert "maximum" not in world.model.tokenizer.decode(trained)


@MODES
async def test_the_end_of_a_turn_stands_once_between_two_turns(make_world, mode) -> None:
    """A11: what the model ended its turn with is what the template would have put there."""
    world: World = await make_world([Step(text="One."), Step(text="Two.")], mode=mode)
    first = await ask(world)
    again = {"role": "assistant", "content": first.choices[0].message.content}
    await ask(world, [*MESSAGES, again, {"role": "user", "content": "and?"}])
    [trace] = assemble(await world.recorded(2), BuilderSpec()).traces
    ids = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    second = world.model.log.generations[1]
    assert ids == second.context_ids + second.sampled_ids
    end = world.model.tokenizer.eos_token_id
    assert (end, end) not in itertools.pairwise(ids)


@pytest.mark.parametrize("mode", ["vllm", "chat"])
async def test_a_hundred_and_thirty_calls_are_at_the_engine_at_once(make_world, mode) -> None:
    """E3: no library's default bounds them in secret."""
    count = 130
    world: World = await make_world(lambda _: Step(text="Fine.", hold_after=0), mode=mode)
    async with world.client(timeout=60) as client:
        calls = [
            asyncio.create_task(
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": f"number {n}"}])
            )
            for n in range(count)
        ]
        await world.model.log.wait_for(lambda log: len(log) == count, timeout=30)
        assert world.node.gateway.inference.status().inflight == count
        world.model.release()
        await asyncio.gather(*calls)
    assert {completion.outcome for completion in await world.recorded(count)} == {"ok"}


@MODES
async def test_the_end_of_a_stream_is_told_only_when_its_call_is_on_disk(make_world, mode, monkeypatch) -> None:
    """E14."""
    world: World = await make_world([Step(text="one two three")], mode=mode)
    committing, go_on = asyncio.Event(), asyncio.Event()
    put = world.node.store.put_completion

    async def slow(completion: Any) -> None:
        committing.set()
        await go_on.wait()
        await put(completion)

    monkeypatch.setattr(world.node.store, "put_completion", slow)
    headers = {"authorization": f"Bearer {world.session.key}"}
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    text = ""
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            await committing.wait()
            while text != "one two three":
                line = await response.content.readline()
                if line.startswith(b"data: "):
                    [choice] = json.loads(line[6:])["choices"]
                    assert choice["finish_reason"] is None
                    text += choice["delta"].get("content") or ""
            assert await world.completions() == []
            go_on.set()
            rest = await response.content.read()
    assert b'"finish_reason":"stop"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    await world.recorded(1)


@MODES
async def test_a_call_that_can_not_be_kept_is_no_answer(make_world, mode, monkeypatch) -> None:
    """E14: never a reply with a silent hole behind it."""
    world: World = await make_world([Step(text="Fine.")], mode=mode)

    async def broken(_: Any) -> None:
        raise PolarError("the disk is full")

    monkeypatch.setattr(world.node.store, "put_completion", broken)
    with pytest.raises(openai.APIStatusError, match="the disk is full") as caught:
        await ask(world)
    assert caught.value.status_code == 500


# ---- what the logprobs are of ----------------------------------------------------------------------------


async def test_a_call_says_what_its_logprobs_are_of_and_a_trap_is_said_once_a_session(make_world, caplog) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."), mode="vllm")
    assert world.node.engine.info.logprobs == "raw"
    with caplog.at_level(logging.WARNING, "polar.gateway"):
        await ask(world)
        await ask(world, temperature=0.5)
        await ask(world, temperature=0.5)
    completions = await world.recorded(3)
    assert [c.metadata["logprobs"] for c in completions] == ["sampling", "raw", "raw"]
    said = [record.getMessage() for record in caplog.records if "logprobs" in record.getMessage()]
    assert len(said) == 1
    assert "session s: the engine's logprobs are before temperature 0.5" in said[0]
    trajectory = assemble(completions, BuilderSpec())
    assert [trace.metadata["logprobs"] for trace in trajectory.traces] == ["sampling", "raw", "raw"]
    assert len(trajectory.metadata["warnings"]) == 1


async def test_the_pins_of_a_task_are_what_counts(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")], mode="vllm", pins=Sampling(temperature=1.0, top_p=0.9))
    await ask(world, temperature=0.2)
    [completion] = await world.recorded(1)
    assert completion.metadata["logprobs_warning"].startswith("the engine's logprobs are before top_p 0.9")
