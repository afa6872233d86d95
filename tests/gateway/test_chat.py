"""The Chat dialect through the vendor's own SDK: what a harness sees, and what is recorded meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading

import aiohttp
import openai
import pytest

from polar.contract.chat import Sampling
from polar.rendering.generic import TemplateRenderer
from tests.gateway.conftest import World
from tests.support.oracle import logprobs
from tests.support.script import Conversation, Step

TOOLS = [
    {
        "type": "function",
        "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_reply_reaches_the_client_and_its_tokens_the_store(make_world, mode) -> None:
    world: World = await make_world([Step(text="The capital of France is Paris.")], mode=mode)
    reply = await world.client().chat.completions.create(model="any-name", messages=[user("capital of France?")])

    assert reply.choices[0].message.content == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "any-name"
    [completion] = await world.completions()
    [generation] = world.model.log.generations
    assert world.prompt(completion) == generation.context_ids
    assert completion.response_ids.tolist() == generation.sampled_ids
    assert completion.logprobs.tolist() == logprobs(generation.context_ids, generation.sampled_ids)
    assert completion.outcome == "ok"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(generation.context_ids)
    assert reply.usage.completion_tokens == len(generation.sampled_ids)


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_tool_loop_is_one_chain_of_exact_prefixes(make_world, mode) -> None:
    world: World = await make_world([Step(text=f"I will look.\n{CALL}"), Step(text="Done.")], mode=mode)
    client = world.client()
    messages = [{"role": "system", "content": "You are a helpful assistant."}, user("list the files")]
    first = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    [call] = first.choices[0].message.tool_calls
    assert call.function.name == "bash"
    assert first.choices[0].finish_reason == "tool_calls"

    # As harnesses do: arguments written again, content kept.
    again = first.choices[0].message.model_dump(exclude_none=True)
    again["tool_calls"][0]["function"]["arguments"] = '{ "command" :"ls -la"}'
    messages += [again, {"role": "tool", "tool_call_id": call.id, "content": "main.py"}]
    second = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "Done."

    one, two = await world.completions()
    assert two.parent_id == one.completion_id
    assert two.split is None
    assert two.shared == one.total_len
    engine_one, engine_two = world.model.log.generations
    assert engine_two.context_ids[: one.total_len] == engine_one.context_ids + engine_one.sampled_ids
    assert world.prompt(two) == engine_two.context_ids
    assert [m.role for m in two.messages] == ["tool"]


def done(conversation: Conversation) -> Step:
    return Step(text="Done.")


def called(arguments: str) -> list[dict]:
    """A conversation after a call with these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [user("go"), said, {"role": "tool", "tool_call_id": "c", "content": "x"}]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_d12_arguments_with_half_a_character_are_served_and_recorded_as_sampled(make_world, mode) -> None:
    raw = r'{"command": "\ud83d"}'
    world: World = await make_world(done, mode=mode)
    await world.client().chat.completions.create(model="m", messages=called(raw), tools=TOOLS)
    [completion] = await world.completions()
    assert [call.arguments for message in completion.messages for call in message.tool_calls] == [raw]
    if mode == "chat":  # an engine parses them, as text that is to be tokenized
        sent = world.model.log.generations[0].request["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(sent) == {"command": "\ufffd"}


@pytest.mark.parametrize("levels", [99, 101, 400, 600, 900, 1500])
async def test_d12_arguments_are_served_as_deep_as_they_are_nested(make_world, levels) -> None:
    raw = '{"command": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}"
    world: World = await make_world(done)
    await world.client().chat.completions.create(model="m", messages=called(raw), tools=TOOLS)
    [completion] = await world.completions()
    assert [call.arguments for message in completion.messages for call in message.tool_calls] == [raw]


@pytest.mark.parametrize("large", ["arguments", "tools", "many", "content", None])
async def test_a_large_call_is_rendered_apart_from_the_loop(make_world, monkeypatch, large) -> None:
    """Else it would hold up every other call meanwhile."""
    threads: set[int] = set()
    render = TemplateRenderer.render

    def seen(self, chat):
        threads.add(threading.get_ident())
        return render(self, chat)

    monkeypatch.setattr(TemplateRenderer, "render", seen)
    world: World = await make_world(done, max_model_len=1 << 20)
    text = "word " * (1 << 14)
    messages = called(json.dumps({"command": text if large == "arguments" else "x"}))
    messages += [user(text if large == "content" else "and?")] * (3000 if large == "many" else 1)
    function = {"name": "bash", "description": text if large == "tools" else "A shell."}
    await world.client().chat.completions.create(
        model="m", messages=messages, tools=[{"type": "function", "function": function}]
    )
    assert {thread == threading.get_ident() for thread in threads} == {large is None}


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_stream_is_the_same_reply_in_pieces(make_world, mode) -> None:
    world: World = await make_world([Step(text=f"I will look.\n{CALL}")], mode=mode)
    stream = await world.client().chat.completions.create(
        model="m", messages=[user("list")], tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    text, name, arguments, finish, usage = "", "", "", None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            finish = choice.finish_reason or finish
    assert (text, name, arguments, finish) == ("I will look.", "bash", '{"command": "ls -la"}', "tool_calls")
    [completion] = await world.completions()
    assert usage.completion_tokens == len(completion.response_ids)


async def test_two_parallel_calls_have_their_own_index_and_id(make_world) -> None:
    world: World = await make_world([Step(text=f"{CALL}\n{CALL}")])
    reply = await world.client().chat.completions.create(model="m", messages=[user("list")], tools=TOOLS)
    calls = reply.choices[0].message.tool_calls
    assert len(calls) == 2
    assert len({call.id for call in calls}) == 2


async def test_sampling_of_the_task_wins_and_max_tokens_is_a_bound(make_world) -> None:
    world: World = await make_world(
        [Step(text="one two three four five six seven eight")], pins=Sampling(max_tokens=3, temperature=0.5)
    )
    reply = await world.client().chat.completions.create(
        model="m", messages=[user("count")], max_tokens=100, temperature=1.0
    )
    assert reply.choices[0].finish_reason == "length"
    [completion] = await world.completions()
    assert len(completion.response_ids) == 3
    assert completion.sampling.temperature == 0.5


async def test_max_tokens_beyond_the_context_is_clamped(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")], max_model_len=64)
    reply = await world.client().chat.completions.create(model="m", messages=[user("hi")], max_tokens=64000)
    assert reply.choices[0].message.content == "Fine."


async def test_a_prompt_over_the_context_is_told_in_the_words_that_make_harnesses_compact(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")], max_model_len=32)
    with pytest.raises(openai.BadRequestError) as caught:
        await world.client().chat.completions.create(model="m", messages=[user("word " * 100)])
    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 32 tokens" in str(caught.value)


async def test_a_stop_string_cuts_the_text_but_not_the_record(make_world) -> None:
    world: World = await make_world([Step(text="Paris is the capital of France.")])
    reply = await world.client().chat.completions.create(model="m", messages=[user("?")], stop=["capital"])
    assert reply.choices[0].message.content == "Paris is the "
    [completion] = await world.completions()
    assert completion.stop_sequence == "capital"
    assert len(completion.response_ids) == len(world.model.log.generations[0].sampled_ids)


@pytest.mark.parametrize(("key", "status"), [("sk-wrong", 401), (None, 401)], ids=["a key of no session", "no key"])
async def test_an_unknown_session_is_refused_and_never_a_default(make_world, key, status) -> None:
    world: World = await make_world([Step(text="Fine.")])
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession() as http:
        url = f"{world.node.server.url}/v1/chat/completions"
        async with http.post(url, json={"model": "m", "messages": [user("hi")]}, headers=headers) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert await world.completions() == []


async def test_a_session_can_be_named_by_the_path(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    client = openai.AsyncOpenAI(base_url=f"{world.node.server.url}/s/{world.session.key}/v1", api_key="literal")
    reply = await client.chat.completions.create(model="m", messages=[user("hi")])
    assert reply.choices[0].message.content == "Fine."


async def test_a_closed_session_takes_no_more_calls(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    await world.node.gateway.close(world.session)
    with pytest.raises(openai.APIStatusError) as caught:
        await world.client().chat.completions.create(model="m", messages=[user("hi")])
    assert caught.value.status_code == 410


async def test_the_models_routes_answer_with_any_name(make_world) -> None:
    world: World = await make_world([])
    client = world.client()
    assert [model.id async for model in client.models.list()] == ["scripted"]
    assert (await client.models.retrieve("vendor/some-model")).id == "vendor/some-model"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid"),
        (b"[]", "not valid"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": "m", "messages": []}', "at least one"),
        (b'{"model": "m", "messages": [{"role": "user", "content": 7}]}', "$.messages[0].content"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 3}', "'n'"),
        (b'{"model": "m", "messages": [{"role": "u\xff"}]}', "not valid"),
    ],
)
async def test_a_body_that_makes_no_sense_is_a_400_that_names_the_field(make_world, body, words) -> None:
    world: World = await make_world([Step(text="Fine.")])
    async with aiohttp.ClientSession(headers={"x-api-key": world.session.key}) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", data=body) as response:
            assert response.status == 400
            assert words in (await response.json())["error"]["message"]


async def test_history_with_broken_arguments_is_served(make_world) -> None:
    """D12: broken JSON, escapes and nothing at all as arguments come back in history; none may fail."""
    world: World = await make_world(lambda _: Step(text="Fine."))
    for arguments in ('{"value": ', '{"a": "b"c"}', "", "null", "[1]"):
        messages = [
            user("go"),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "bash", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": "x", "content": "error"},
        ]
        reply = await world.client().chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert reply.choices[0].message.content == "Fine."


async def test_fifty_calls_at_once_are_fifty_completions(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    client = world.client()
    await asyncio.gather(
        *(client.chat.completions.create(model="m", messages=[user(f"number {n}")]) for n in range(50))
    )
    completions = await world.completions()
    assert len(completions) == len(world.model.log.generations) == 50
    assert sorted(c.seq for c in completions) == list(range(50))


async def test_every_event_of_a_stream_names_its_reply_from_the_first_on(make_world) -> None:
    world: World = await make_world([Step(text="one two three", chunk_tokens=100)])
    headers = {"authorization": f"Bearer {world.session.key}"}
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            lines = (await response.read()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    [completion] = await world.completions()
    assert {event.get("id") for event in events} == {f"chatcmpl-{completion.completion_id}"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_the_events_of_the_responses_api_are_numbered_in_order(make_world) -> None:
    world: World = await make_world([Step(text="one two three", chunk_tokens=100)])
    headers = {"authorization": f"Bearer {world.session.key}"}
    body = {"model": "m", "input": "hi", "stream": True}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/responses", json=body) as response:
            lines = (await response.read()).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_an_edited_text_beside_a_call_is_a_new_branch_and_reaches_the_model(make_world) -> None:
    world: World = await make_world([Step(text=f"The password is HUNTER2.\n{CALL}"), Step(text="Done.")])
    client = world.client()
    first = await client.chat.completions.create(model="m", messages=[user("list")], tools=TOOLS)
    again = first.choices[0].message.model_dump(exclude_none=True)
    again["content"] = "[REDACTED]"
    result = {"role": "tool", "tool_call_id": again["tool_calls"][0]["id"], "content": "main.py"}
    await client.chat.completions.create(model="m", messages=[user("list"), again, result], tools=TOOLS)
    _, two = await world.completions()
    assert two.parent_id is None
    assert two.split == "reply_not_recorded"
    prompt = world.model.tokenizer.decode(world.model.log.generations[1].context_ids)
    assert "REDACTED" in prompt
    assert "HUNTER2" not in prompt


async def test_an_empty_bearer_does_not_hide_another_key(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    headers = {"authorization": "Bearer ", "x-api-key": world.session.key}
    async with aiohttp.ClientSession(headers=headers) as http:
        body = {"model": "m", "messages": [user("hi")]}
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
