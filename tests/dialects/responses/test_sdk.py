"""The Responses dialect through the vendor's own SDK: what a harness sees, and what is recorded meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from polar.gateway.session import LiveSession
from tests.dialects.responses.conftest import AGENTS, BASH, user
from tests.gateway.conftest import World
from tests.support.script import Step

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'
SPAWN = '<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nLet me think.\n</think>\n\n"
PNG = "data:image/png;base64,iVBORw0KGgo="


def sync_client(world: World) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{world.node.server.url}/v1", api_key=world.session.key, max_retries=0)


@pytest.mark.parametrize("mode", ["tito", "chat"])
@pytest.mark.parametrize("way", ["whole", "stream"])
async def test_thinking_text_and_two_calls(make_world, mode, way) -> None:
    world: World = await make_world([Step(text=f"{THOUGHT}I will look.\n{CALL}\n{SPAWN}")], mode=mode)
    client = world.client()
    asked: dict[str, Any] = {"model": "any-name", "input": "list the files", "tools": [BASH, AGENTS]}
    if way == "whole":
        reply = await client.responses.create(**asked)
    else:
        async with client.responses.stream(**asked) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            reply = await stream.get_final_response()
        assert text == reply.output_text

    assert (reply.status, reply.model, reply.output_text) == ("completed", "any-name", "I will look.")
    thought, _, bash, spawn = reply.output
    assert thought.type == "reasoning"
    assert thought.content[0].text.strip() == "Let me think."
    assert (bash.type, bash.name, bash.arguments) == ("function_call", "bash", '{"command": "ls -la"}')
    assert (spawn.namespace, spawn.name) == ("agents", "spawn")
    assert bash.call_id != spawn.call_id
    [completion] = await world.completions()
    assert completion.dialect == "openai_responses"
    assert completion.outcome == "ok"
    assert reply.id == f"resp_{completion.completion_id}"
    assert reply.usage.output_tokens == len(completion.response_ids)
    assert reply.usage.input_tokens == completion.prompt_len


async def test_the_blocking_client_sees_the_same(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Paris."))

    def ask() -> tuple[str, str]:
        client = sync_client(world)
        whole = client.responses.create(model="m", input="capital of France?").output_text
        pieces = client.responses.create(model="m", input="capital?", stream=True)
        return whole, "".join(event.delta for event in pieces if event.type == "response.output_text.delta")

    assert await asyncio.to_thread(ask) == ("Paris.", "Paris.")


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_the_previous_response_stands_before_what_is_new(make_world, mode) -> None:
    world: World = await make_world([Step(text=f"{THOUGHT}{CALL}"), Step(text="Done."), Step(text="Bye.")], mode=mode)
    client = world.client()
    asked: dict[str, Any] = {"model": "m", "instructions": "Be brief.", "tools": [BASH]}
    first = await client.responses.create(input="list the files", **asked)
    [call] = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "main.py"}
    second = await client.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert second.previous_response_id == first.id
    third = await client.responses.create(input="thanks", previous_response_id=second.id, **asked)
    assert third.output_text == "Bye."

    one, two, three = await world.completions()
    assert (two.parent_id, three.parent_id) == (one.completion_id, two.completion_id)
    assert [c.split for c in (one, two, three)] == [None, None, None]
    assert (two.shared, three.shared) == (one.total_len, two.total_len)
    conversation = world.session.graph.conversation(three)
    assert [m.role for m in conversation] == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


async def test_instructions_are_not_inherited_from_the_previous_response(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    first = await client.responses.create(model="m", input="one", instructions="Be brief.")
    second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
    await client.responses.create(model="m", input="three", previous_response_id=second.id, instructions="Be long.")
    _, two, three = await world.completions()
    said = [[str(m.content) for m in world.session.graph.conversation(c)] for c in (two, three)]
    assert said[0] == ["one", "Fine.", "two", "Fine."]
    assert said[1] == ["Be long.", "one", "Fine.", "two", "Fine.", "three", "Fine."]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_previous_response_is_refused_as_the_vendor_does(make_world, stream) -> None:
    world: World = await make_world([Step(text="Fine.")])
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().responses.create(model="m", input="x", previous_response_id="resp_no", stream=stream)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    assert "resp_no" in str(caught.value)
    assert await world.completions() == []


async def test_a_response_goes_on_whether_it_was_to_be_stored_or_not_but_in_its_own_session_only(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    first = await client.responses.create(model="m", input="one", store=False)
    second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
    one, two = await world.completions()
    assert (first.store, second.store, two.parent_id, two.split) == (False, True, one.completion_id, None)
    other = LiveSession(session_id="other")
    world.node.gateway.open(other)
    with pytest.raises(openai.BadRequestError, match="not found"):
        await world.client(api_key=other.key).responses.create(model="m", input="x", previous_response_id=first.id)


async def test_what_the_sdk_gave_is_sent_back_as_it_is_and_the_chain_holds(make_world) -> None:
    """As programs of the SDK do: the output items themselves go into the next input, or what they dump to."""
    world: World = await make_world(lambda c: Step(text="Done." if c.turn else f"{THOUGHT}Look.\n{CALL}\n{SPAWN}"))
    client = world.client()
    for keep in (lambda item: item, lambda item: item.model_dump(), lambda item: item.model_dump(exclude_unset=True)):
        history: list[Any] = [user(f"list the files {len(await world.completions())}")]
        for _ in range(2):
            reply = await client.responses.create(model="m", input=history, tools=[BASH, AGENTS])
            calls = [item for item in reply.output if item.type == "function_call"]
            history += [keep(item) for item in reply.output]
            history += [{"type": "function_call_output", "call_id": c.call_id, "output": "ok"} for c in calls]
        *_, one, two = await world.completions()
        assert (two.parent_id, two.split, two.shared) == (one.completion_id, None, one.total_len)


async def test_what_is_not_kept_here_is_a_404_in_the_vendors_shape(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    reply = await client.responses.create(model="m", input="one")
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(reply.id)
        assert caught.value.code == "not_found"


async def test_input_tokens_are_those_of_the_real_prompt_and_nothing_is_recorded(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    counted = await client.responses.input_tokens.count(input="how long is this?", instructions="Be brief.")
    assert counted.object == "response.input_tokens"
    assert await world.completions() == []
    reply = await client.responses.create(model="m", input="how long is this?", instructions="Be brief.")
    assert reply.usage.input_tokens == counted.input_tokens
    go_on = {"model": "m", "input": "more", "previous_response_id": reply.id}
    counted = await client.responses.input_tokens.count(**go_on)
    assert (await client.responses.create(**go_on)).usage.input_tokens == counted.input_tokens


async def test_images_of_a_user_and_of_a_tool_reach_the_engine(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="A cat."), mode="chat")
    image = {"type": "input_image", "image_url": PNG, "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "what is it?"}, image]},
        {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "see"}, image]},
    ]
    reply = await world.client().responses.create(model="m", input=items, tools=[BASH])
    assert reply.output_text == "A cat."
    [completion] = await world.completions()
    assert [m.role for m in completion.messages] == ["user", "assistant", "tool", "user"]


async def test_a_reply_cut_by_its_limit_is_incomplete(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="one two three four five six seven"))
    client = world.client()
    reply = await client.responses.create(model="m", input="count", max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    found = [e async for e in await client.responses.create(model="m", input="c", max_output_tokens=3, stream=True)]
    assert found[-1].type == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_told_in_the_words_that_make_harnesses_compact(make_world, stream) -> None:
    world: World = await make_world([Step(text="Fine.")], max_model_len=32)
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().responses.create(model="m", input="word " * 100, stream=stream)
    assert caught.value.code == "context_length_exceeded"


async def test_an_engine_that_breaks_in_a_stream_is_a_failed_response_and_a_cut(make_world) -> None:
    world: World = await make_world([Step(text="one two three four five", cut_after=3)], mode="chat")
    found = []
    with pytest.raises(openai.APIConnectionError):
        async for event in await world.client().responses.create(model="m", input="x", stream=True):
            found.append(event)
    assert found[-1].type == "response.failed"
    assert not any(event.type in ("response.completed", "error") for event in found)


async def test_a_websocket_is_refused_in_the_way_that_makes_codex_fall_back_at_once(make_world) -> None:
    world: World = await make_world([])
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {world.session.key}"}) as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(f"{world.node.server.url}/v1/responses")
        assert caught.value.status == 426


async def test_fifty_calls_at_once_are_fifty_completions(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    await asyncio.gather(*(client.responses.create(model="m", input=[user(f"number {n}")]) for n in range(50)))
    completions = await world.completions()
    assert len(completions) == len(world.model.log.generations) == 50
