"""Weights that change while calls are under way: each token says what it was sampled from, and a reply that the
engine stops in the middle is one reply all the same."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import openai
import pytest

from polar.contract.chat import Message, TextDelta
from polar.contract.completion import Completion
from polar.contract.task import BuilderSpec
from polar.engines.base import TokenChunk
from polar.trajectories.assemble import assemble
from tests.gateway.conftest import World
from tests.support.oracle import logprobs
from tests.support.script import Conversation, Step
from tests.support.tokens import ScriptedTokenEngine

TEXT = "one two three four five six"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
HELD = Step(text=TEXT, hold_after=2)
NAMING = ("vllm", "sglang")
"""Modes in which the engine names the weights of a reply."""


async def ask(world: World, **options: Any) -> Any:
    return await world.client().chat.completions.create(model="m", messages=MESSAGES, **options)


async def sampled(world: World, tokens: int, generation: int = 0) -> None:
    """Until the engine has sampled so many tokens of a generation."""
    await world.model.log.wait_for(lambda log: len(log) > generation and len(log[generation].sampled_ids) >= tokens)


async def recorded(world: World) -> Completion:
    [completion] = await world.recorded(1)
    return completion


def spans(completion: Completion) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in completion.weight_spans]


def silent(world: World) -> None:
    """An engine that names no weight version."""
    world.model.weight_version = None  # type: ignore[assignment]


class Stopped:
    """An engine whose first ``times`` replies are stopped after ``after`` more tokens each (``abort``), as by a pause
    for new weights; the weights after each stop are the next step's."""

    def __init__(self, world: World, after: int, times: int = 1) -> None:
        self.ids = world.model.tokenizer.encode(TEXT, add_special_tokens=False)
        self._world, self._after, self._times = world, after, times
        self._asked = 0
        self._prompt = 0
        world.model.weight_version = "step-0"
        world.model.script.choose = self

    def __call__(self, conversation: Conversation) -> Step:
        self._prompt = self._prompt or len(conversation.prompt_ids)
        done = len(conversation.prompt_ids) - self._prompt
        self._world.model.weight_version = f"step-{self._asked}"
        self._asked += 1
        if self._asked <= self._times:
            return Step(ids=tuple(self.ids[done : done + self._after]), finish_reason="abort")
        return Step(ids=tuple(self.ids[done:]))


# ---- which version ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])
async def test_what_the_operator_sets_is_on_every_token_from_then_on(make_world, mode) -> None:
    world: World = await make_world(lambda _: Step(text=TEXT), mode=mode)
    if mode == "tito":
        silent(world)
    elif mode in NAMING:
        world.model.weight_version = "41"
    await ask(world)
    world.node.gateway.inference.set_version(42)
    world.model.weight_version = "42" if mode in NAMING else world.model.weight_version
    await ask(world)
    first, second = await world.recorded(2)
    assert spans(first) == ([("41", 0, len(first.response_ids))] if mode in NAMING else [])
    assert spans(second) == [("42", 0, len(second.response_ids))]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_call_in_flight_when_the_version_is_set_has_both(make_world, mode) -> None:
    world: World = await make_world([HELD], mode=mode)
    if mode == "tito":
        silent(world)
    world.node.gateway.inference.set_version("41")
    asking = asyncio.create_task(ask(world, stream=True))
    stream = await asking
    texts: list[str] = []
    async for chunk in stream:
        texts += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        if len(texts) == 2:
            world.node.gateway.inference.set_version("42")
            world.model.release()
    completion = await recorded(world)
    assert spans(completion) == [("41", 0, 2), ("42", 2, len(completion.response_ids))]
    if mode == "tito":  # token by token; over the wire, several may come at once
        assert "weight_version_uncertain" not in completion.metadata


async def test_tokens_that_came_in_one_piece_over_a_change_say_so(make_world) -> None:
    """A whole reply (no stream) is one piece: which of its tokens are of the old weights, nobody can tell."""
    world: World = await make_world([HELD], mode="chat")
    world.node.gateway.inference.set_version("41")
    asking = asyncio.create_task(ask(world))
    await sampled(world, 2)
    world.node.gateway.inference.set_version("42")
    world.model.release()
    await asking
    completion = await recorded(world)
    assert spans(completion) == [("42", 0, len(completion.response_ids))]
    assert completion.metadata["weight_version_uncertain"] == len(completion.response_ids)


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
async def test_the_engines_report_counts_and_a_disagreement_is_said_once_a_change(make_world, mode, caplog) -> None:
    world: World = await make_world(lambda _: Step(text=TEXT), mode=mode)
    world.model.weight_version = "40"
    inference = world.node.gateway.inference
    with caplog.at_level(logging.WARNING, "polar.gateway"):
        inference.set_version(41)
        await ask(world)
        await ask(world)
        inference.set_version(42)
        await ask(world)
    completions = await world.recorded(3)
    for completion, told in zip(completions, ("41", "41", "42"), strict=True):
        assert spans(completion) == [("40", 0, len(completion.response_ids))]
        assert completion.metadata["weight_spans_set"] == [[told, 0, len(completion.response_ids)]]
    lines = [record.getMessage() for record in caplog.records if "weight version" in record.getMessage()]
    assert len(lines) == 2
    assert "weight version 41 was set, but the engine reports 40" in lines[0]
    trajectory = assemble(completions, BuilderSpec())
    assert [line.split(",")[0] for line in trajectory.metadata["warnings"]] == [
        "weight version 41 was set",
        "weight version 42 was set",
    ]


# ---- pause and resume ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])
async def test_a_pause_waits_for_calls_in_flight_and_holds_new_ones(make_world, mode) -> None:
    """C11."""
    world: World = await make_world(lambda _: HELD, mode=mode)
    inference = world.node.gateway.inference
    first = asyncio.create_task(ask(world))
    await sampled(world, 2)
    pausing = asyncio.create_task(inference.pause(10.0))
    second = asyncio.create_task(ask(world))
    async with asyncio.timeout(10):
        while not inference.status().waiting:
            await asyncio.sleep(0.001)
    status = inference.status()
    assert (status.paused, status.inflight, status.waiting) == (False, 1, 1)
    world.model.release()
    status = await pausing
    assert (status.paused, status.inflight) == (True, 0)
    await first
    assert len(world.model.log.generations) == 1
    assert not inference.resume().paused
    await second
    assert len(world.model.log.generations) == 2
    assert inference.status().inflight == 0


async def test_a_pause_that_can_not_drain_in_time_is_undone(make_world) -> None:
    world: World = await make_world(lambda c: HELD if c.last == "hi" else Step(text="Fine."))
    inference = world.node.gateway.inference
    asking = asyncio.create_task(ask(world))
    await sampled(world, 2)
    status = await inference.pause(0.01)
    assert (status.paused, status.inflight) == (False, 1)
    reply = await world.client().chat.completions.create(model="m", messages=[{"role": "user", "content": "other"}])
    assert reply.choices[0].message.content == "Fine.", "new calls go on"
    world.model.release()
    await asking


async def test_who_resumes_undoes_a_pause_that_still_waits(make_world) -> None:
    world: World = await make_world([HELD])
    inference = world.node.gateway.inference
    asking = asyncio.create_task(ask(world))
    await sampled(world, 2)
    pausing = asyncio.create_task(inference.pause(60.0))
    await asyncio.sleep(0)
    inference.resume()
    assert not (await pausing).paused
    world.model.release()
    await asking


async def test_one_pause_in_vain_does_not_undo_another(make_world) -> None:
    world: World = await make_world([HELD])
    inference = world.node.gateway.inference
    asking = asyncio.create_task(ask(world))
    await sampled(world, 2)
    patient = asyncio.create_task(inference.pause(60.0))
    assert not (await inference.pause(0.01)).paused
    world.model.release()
    assert (await patient).paused
    assert (await inference.pause(0.01)).paused, "again: it is paused already"
    await asking


async def test_a_held_call_whose_client_leaves_leaves_nothing_behind(make_world) -> None:
    world: World = await make_world([HELD], grace=0.01)
    inference = world.node.gateway.inference
    await inference.pause(1.0)
    asking = asyncio.create_task(ask(world))
    async with asyncio.timeout(10):
        while not inference.status().waiting:
            await asyncio.sleep(0.001)
    asking.cancel()
    async with asyncio.timeout(10):
        while inference.status().waiting:
            await asyncio.sleep(0.001)
    assert await world.completions() == []
    assert inference.resume().inflight == 0


# ---- stopped in the middle -------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
async def test_a_reply_that_an_update_stops_goes_on_under_the_new_weights(make_world, mode, stream, times) -> None:
    world: World = await make_world([], mode=mode)
    stopped = Stopped(world, after=2, times=times)
    reply = await ask(world, stream=stream, max_tokens=40)
    if stream:
        text = "".join([c.delta.content or "" async for chunk in reply for c in chunk.choices])
    else:
        text = reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.completion_tokens == len(stopped.ids) + 1
    assert text == TEXT

    completion = await recorded(world)
    generations = world.model.log.generations
    assert len(generations) == times + 1
    whole = [*stopped.ids, world.model.tokenizer.eos_token_id]
    prompt = world.prompt(completion)
    assert completion.response_ids.tolist() == whole
    assert completion.logprobs.tolist() == logprobs(prompt, whole)
    for number, generation in enumerate(generations):
        assert generation.context_ids == prompt + whole[: 2 * number]
    ends = [2 * (number + 1) for number in range(times)]
    expected = [(f"step-{n}", 2 * n, end) for n, end in enumerate(ends)]
    assert spans(completion) == [*expected, (f"step-{times}", 2 * times, len(whole))]
    assert (completion.outcome, completion.metadata["continued"]) == ("ok", times)


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
async def test_the_bound_on_a_reply_holds_over_its_parts(make_world, mode) -> None:
    world: World = await make_world([], mode=mode)
    Stopped(world, after=2)
    reply = await ask(world, max_tokens=5)
    assert reply.choices[0].finish_reason == "length"
    completion = await recorded(world)
    assert (completion.outcome, len(completion.response_ids)) == ("ok", 5)


async def test_a_reply_stopped_at_its_bound_has_ended(make_world) -> None:
    world: World = await make_world([])
    Stopped(world, after=2)
    reply = await ask(world, max_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert len(world.model.log.generations) == 1
    assert (await recorded(world)).outcome == "ok"


async def test_a_stopped_reply_waits_until_inference_goes_on(make_world) -> None:
    """A trainer pauses the gateway, then stops the engine: the calls in flight count as drained, and go on after."""
    world: World = await make_world([])
    stopped = Stopped(world, after=2)
    steps = stopped.__call__

    def held(conversation: Conversation) -> Step:
        step = steps(conversation)
        return Step(ids=step.ids, finish_reason="abort", hold_after=1) if step.finish_reason == "abort" else step

    world.model.script.choose = held
    inference = world.node.gateway.inference
    asking = asyncio.create_task(ask(world))
    await sampled(world, 1)
    pausing = asyncio.create_task(inference.pause(10.0))
    await asyncio.sleep(0)
    world.model.release()
    status = await pausing
    assert (status.paused, status.inflight, status.waiting) == (True, 0, 1)
    assert len(world.model.log.generations) == 1
    inference.resume()
    assert (await asking).choices[0].message.content == TEXT
    assert len(world.model.log.generations) == 2


async def test_a_stopped_reply_that_nobody_waits_for_is_given_up(make_world) -> None:
    world: World = await make_world([], grace=0.01)
    stopped = Stopped(world, after=2)
    steps = stopped.__call__
    paused = asyncio.Event()

    def pausing(conversation: Conversation) -> Step:
        world.node.gateway.inference._paused = True
        world.node.gateway.inference._turn()
        paused.set()
        return steps(conversation)

    world.model.script.choose = pausing
    asking = asyncio.create_task(ask(world))
    await paused.wait()
    await sampled(world, 2)
    asking.cancel()
    completion = await recorded(world)
    assert (completion.outcome, completion.response_ids.tolist()) == ("abandoned", stopped.ids[:2])


async def test_an_engine_that_only_stops_is_not_asked_for_ever(make_world, monkeypatch) -> None:
    asked: list[str] = []

    async def stop(self: Any, *_: Any, request_id: str, **__: Any) -> AsyncGenerator[TokenChunk, None]:
        asked.append(request_id)
        yield TokenChunk((), (), finish_reason="abort")

    monkeypatch.setattr("polar.gateway.continuing.FIRST_WAIT", 0.0)
    monkeypatch.setattr(ScriptedTokenEngine, "generate", stop)
    world: World = await make_world([])
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world)
    assert caught.value.status_code == 503
    assert (await recorded(world)).outcome == "aborted"
    assert len(set(asked)) == len(asked) == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_in_chat_mode_a_stopped_reply_is_an_error_that_may_be_tried_again(make_world, stream) -> None:
    world: World = await make_world([Step(text="one two", finish_reason="abort")], mode="chat")
    headers = {"authorization": f"Bearer {world.session.key}"}
    body = {"model": "m", "messages": MESSAGES, "stream": stream}
    received = b""
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            if stream:
                with pytest.raises(aiohttp.ClientPayloadError):
                    async for piece in response.content.iter_any():
                        received += piece
                assert b"[DONE]" not in received
                assert b"stopped the reply" in received
            else:
                assert response.status == 503
                assert response.headers["retry-after"] == "1"
                assert "stopped the reply" in json.loads(await response.read())["error"]["message"]
    completion = await recorded(world)
    assert completion.outcome == "aborted"
    assert completion.response_ids.tolist() == world.model.log.generations[0].sampled_ids
    assert not world.session.closed


async def test_what_was_seen_before_a_stop_stays_the_beginning_of_the_reply(make_world) -> None:
    """Text that was held back at the stop (half a word, half a tag) comes when it is whole, once."""
    world: World = await make_world([])
    stopped = Stopped(world, after=1, times=4)
    reply = await ask(world, stream=True)
    pieces = [TextDelta(c.delta.content or "") async for chunk in reply for c in chunk.choices]
    assert "".join(piece.text for piece in pieces) == TEXT
    completion = await recorded(world)
    assert completion.reply == Message("assistant", TEXT)
    assert completion.response_ids.tolist()[:-1] == stopped.ids
