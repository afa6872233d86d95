"""The dialect through the vendor's own SDK: what a harness sees, and what is recorded meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from google.genai import errors, types

from polar.gateway import app
from tests.dialects.gemini.conftest import BASH, client, events, parts_of, user
from tests.gateway.conftest import World
from tests.support.script import Step

THINKS = "<think>\nLet me think.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la", "timeout": 2.0}}\n</tool_call>'
TOOLS: Any = [types.Tool(function_declarations=[types.FunctionDeclaration(**BASH)])]
SHOWN = types.ThinkingConfig(include_thoughts=True)


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(automatic_function_calling={"disable": True}, **fields)


@pytest.mark.parametrize("mode", ["tito", "chat"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
async def test_a_reply_reaches_the_client_and_its_tokens_the_store(make_world, mode, sync) -> None:
    world: World = await make_world([Step(text=f"{THINKS}It is Paris.\n{CALL}")], mode=mode)
    request: Any = {"model": "any-name", "contents": "capital?", "config": config(tools=TOOLS, thinking_config=SHOWN)}
    google = client(world)
    if sync:
        reply = await asyncio.to_thread(google.models.generate_content, **request)
    else:
        reply = await google.aio.models.generate_content(**request)

    thought, text, call = reply.candidates[0].content.parts
    assert thought.thought
    assert thought.text == "Let me think."
    assert text.text == "It is Paris."
    assert (call.function_call.name, call.function_call.args) == ("bash", {"command": "ls -la", "timeout": 2.0})
    assert call.thought_signature
    assert reply.candidates[0].finish_reason == types.FinishReason.STOP
    assert reply.model_version == "any-name"
    [completion] = await world.completions()
    assert reply.response_id == completion.completion_id
    assert completion.outcome == "ok"
    [generation] = world.model.log.generations
    assert completion.response_ids.tolist() == generation.sampled_ids
    assert reply.usage_metadata.prompt_token_count == len(generation.context_ids)
    assert reply.usage_metadata.candidates_token_count == len(generation.sampled_ids)


@pytest.mark.parametrize("mode", ["tito", "chat"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
async def test_a_stream_is_the_same_reply_in_pieces(make_world, mode, sync) -> None:
    world: World = await make_world([Step(text=f"{THINKS}It is Paris.\n{CALL}\n{CALL}")], mode=mode)
    request: Any = {"model": "m", "contents": "capital?", "config": config(tools=TOOLS, thinking_config=SHOWN)}
    google = client(world)
    if sync:
        chunks = await asyncio.to_thread(lambda: list(google.models.generate_content_stream(**request)))
    else:
        chunks = [chunk async for chunk in await google.aio.models.generate_content_stream(**request)]

    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert len(chunks) > 3
    assert "".join(part.text for part in parts if part.thought) == "Let me think."
    assert "".join(part.text or "" for part in parts if not part.thought) == "It is Paris."
    calls = [part.function_call for part in parts if part.function_call]
    assert [call.args for call in calls] == [{"command": "ls -la", "timeout": 2.0}] * 2
    assert len({call.id for call in calls}) == 2
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    [completion] = await world.completions()
    assert chunks[-1].usage_metadata.candidates_token_count == len(completion.response_ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_sdks_own_chat_is_one_chain_of_exact_prefixes(make_world, stream) -> None:
    """It keeps each chunk as a content of its own, and forgets turns that it takes for invalid."""
    world: World = await make_world([Step(text=f"{THINKS}I will look.\n{CALL}"), Step(text="It is main.py.")])
    chat = client(world).aio.chats.create(model="m", config=config(tools=TOOLS, system_instruction="You are kind."))

    async def send(message: Any) -> list[Any]:
        if not stream:
            return [await chat.send_message(message)]
        return [chunk async for chunk in await chat.send_message_stream(message)]

    calls = [call for reply in await send("list the files") for call in reply.function_calls or ()]
    assert [call.args["command"] for call in calls] == ["ls -la"]
    await send([types.Part.from_function_response(name="bash", response={"output": "main.py"})])
    one, two = await world.recorded(2)
    assert (two.parent_id, two.split, two.shared) == (one.completion_id, None, one.total_len)


async def test_the_sdk_calls_python_functions_by_itself(make_world) -> None:
    def bash(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    world: World = await make_world([Step(text=CALL.replace(', "timeout": 2.0', "")), Step(text="Done.")])
    reply = await client(world).aio.models.generate_content(model="m", contents="go", config={"tools": [bash]})
    assert reply.text == "Done."
    one, two = await world.recorded(2)
    assert [message.content for message in two.messages] == ["ran ls -la"]
    assert (two.parent_id, two.split) == (one.completion_id, None)
    assert one.tools[0].parameters["properties"] == {"command": {"type": "string"}}


async def test_settings_reach_the_engine(make_world) -> None:
    world: World = await make_world([Step(text="one two three four five six")])
    settings = config(max_output_tokens=2, temperature=0.5, top_k=40, stop_sequences=["END"], seed=3)
    reply = await client(world).aio.models.generate_content(model="m", contents="count", config=settings)
    assert reply.candidates[0].finish_reason == types.FinishReason.MAX_TOKENS
    [completion] = await world.completions()
    sampling = completion.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (2, 0.5, 40)
    assert (sampling.stop, sampling.seed) == (("END",), 3)


async def test_a_picture_reaches_the_engine(make_world) -> None:
    world: World = await make_world([Step(text="A cat.")], mode="chat")
    picture = types.Part.from_bytes(data=b"\xfb\xff\x00", mime_type="image/png")
    reply = await client(world).aio.models.generate_content(model="m", contents=["what is it?", picture])
    assert reply.text == "A cat."
    [generation] = world.model.log.generations
    image = generation.request["messages"][0]["content"][1]
    assert image == {"type": "image_url", "image_url": {"url": "data:image/png;base64,+/8A"}}


async def test_a_schema_reaches_the_engine(make_world) -> None:
    world: World = await make_world([Step(text='{"a": "x"}')], mode="chat")
    schema = types.Schema(type="OBJECT", properties={"a": types.Schema(type="STRING", nullable=True)})
    wanted = config(response_mime_type="application/json", response_schema=schema)
    await client(world).aio.models.generate_content(model="m", contents="json", config=wanted)
    [generation] = world.model.log.generations
    sent = generation.request["response_format"]["json_schema"]["schema"]
    assert sent == {"type": "object", "properties": {"a": {"type": ["string", "null"]}}}


async def test_tokens_are_counted_without_a_generation(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    counted = await client(world).aio.models.count_tokens(model="m", contents="how long is this?")
    assert world.model.log.generations == []
    reply = await client(world).aio.models.generate_content(model="m", contents="how long is this?")
    assert counted.total_tokens == reply.usage_metadata.prompt_token_count
    assert len(await world.completions()) == 1


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_the_models_routes_answer_with_any_name(make_world, version) -> None:
    world: World = await make_world([])
    google = client(world, api_version=version)
    assert [model.name async for model in await google.aio.models.list()] == ["models/scripted"]
    assert (await google.aio.models.get(model="vendor/some-model")).name == "models/vendor/some-model"


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_every_version_of_the_api_is_served(make_world, version) -> None:
    world: World = await make_world([Step(text="Fine.")])
    reply = await client(world, api_version=version).aio.models.generate_content(model="a/b:c", contents="hi")
    assert reply.text == "Fine."
    [completion] = await world.completions()
    assert (completion.model_requested, completion.dialect) == ("a/b:c", "gemini")


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_prompt_over_the_context_is_told_in_the_vendors_words(make_world, stream) -> None:
    world: World = await make_world([Step(text="Fine.")], max_model_len=32)
    models = client(world).aio.models
    request: Any = {"model": "m", "contents": "word " * 100}
    with pytest.raises(errors.ClientError) as caught:
        if stream:
            await anext(await models.generate_content_stream(**request))
        else:
            await models.generate_content(**request)
    assert (caught.value.code, caught.value.status) == (400, "INVALID_ARGUMENT")
    assert caught.value.message.endswith("exceeds the maximum number of tokens allowed (32).")


async def test_an_unknown_key_is_refused(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    google = client(world, headers={"x-goog-api-key": "sk-wrong"})
    with pytest.raises(errors.ClientError) as caught:
        await google.aio.models.generate_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")


@pytest.mark.parametrize(("engine", "seen"), [(503, (503, "UNAVAILABLE")), (500, (502, "UNAVAILABLE"))])
async def test_an_engine_that_fails_is_a_server_error(make_world, engine, seen) -> None:
    world: World = await make_world([Step(status=engine)])
    with pytest.raises(errors.ServerError) as caught:
        await client(world).aio.models.generate_content(model="m", contents="hi")
    assert (caught.value.code, caught.value.status) == seen


async def test_a_stream_that_fails_midway_raises_and_is_never_a_short_answer(make_world) -> None:
    world: World = await make_world([Step(text="one two three four five six", cut_after=4)])
    stream = await client(world).aio.models.generate_content_stream(model="m", contents="count")
    with pytest.raises((errors.APIError, aiohttp.ClientError)) as caught:
        async for chunk in stream:
            assert chunk.candidates[0].finish_reason is None
    assert not isinstance(caught.value, errors.APIError) or caught.value.status == "UNAVAILABLE"


# ---- the wire --------------------------------------------------------------------------------------------


async def post(world: World, route: str, handle: Any, **fields: Any) -> None:
    body = {"contents": [user("hi")], **fields}
    async with aiohttp.ClientSession(headers={"x-goog-api-key": world.session.key}) as http:
        async with http.post(f"{world.node.server.url}/v1beta/models/m:{route}", json=body) as response:
            await handle(response)


async def test_headers_come_at_once_and_nothing_but_chunks_while_nothing_happens(make_world, monkeypatch) -> None:
    """Gemini CLI gives up after 60 seconds without headers or 300 without a byte, and breaks on comments."""
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    monkeypatch.setattr(app, "KEEPALIVE", 0.01)
    world: World = await make_world([Step(text="Fine.", hold_after=0)])

    async def handle(response: aiohttp.ClientResponse) -> None:
        assert response.status == 200
        for _ in range(2):
            life = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            assert parts_of(life) == [{"text": ""}]
        world.model.release()
        chunks = events(await response.read())
        assert "".join(part["text"] for part in parts_of(*chunks)) == "Fine."
        assert [chunk["candidates"][0].get("finishReason") for chunk in chunks if "usageMetadata" in chunk] == [
            "STOP"
        ]

    await post(world, "streamGenerateContent?alt=sse", handle)


async def test_a_call_that_is_held_back_is_no_silence(make_world, monkeypatch) -> None:
    monkeypatch.setattr(app, "KEEPALIVE", 0.01)
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    world: World = await make_world([Step(text=CALL, token_delay=0.02)])

    async def handle(response: aiohttp.ClientResponse) -> None:
        *early, last = events(await response.read())
        assert len(early) > 2
        assert {part["text"] for part in parts_of(*early)} == {""}
        assert parts_of(last)[0]["functionCall"]["args"] == {"command": "ls -la", "timeout": 2.0}

    await post(world, "streamGenerateContent?alt=sse", handle, tools=[{"functionDeclarations": [BASH]}])


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
async def test_signs_of_life_leave_no_trace_in_a_chat_of_the_sdk(make_world, monkeypatch, sync) -> None:
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    monkeypatch.setattr(app, "KEEPALIVE", 0.01)
    world: World = await make_world([Step(text="It is Paris.", token_delay=0.03), Step(text="It is Madrid.")])
    google = client(world)
    if sync:

        def talk() -> list[str]:
            chat = google.chats.create(model="m")
            return ["".join(c.text for c in chat.send_message_stream(ask)) for ask in ("capital?", "and of Spain?")]

        said = await asyncio.to_thread(talk)
    else:
        chat = google.aio.chats.create(model="m")
        said = [
            "".join([c.text async for c in await chat.send_message_stream(ask)])
            for ask in ("capital?", "and of Spain?")
        ]
    assert said == ["It is Paris.", "It is Madrid."]
    one, two = await world.completions()
    assert (two.parent_id, two.split) == (one.completion_id, None)


async def test_without_sse_a_stream_is_a_json_array(make_world, monkeypatch) -> None:
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    world: World = await make_world([Step(text="Fine, thank you.", hold_after=2)])

    async def handle(response: aiohttp.ClientResponse) -> None:
        assert response.content_type == "application/json"
        world.model.release()
        chunks = json.loads(await response.read())
        texts = [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks]
        assert "".join(texts) == "Fine, thank you."
        assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"

    await post(world, "streamGenerateContent", handle)


async def test_an_error_before_the_first_byte_is_a_status(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])

    async def handle(response: aiohttp.ClientResponse) -> None:
        assert response.status == 400
        assert "candidateCount" in (await response.json())["error"]["message"]

    await post(world, "streamGenerateContent?alt=sse", handle, generationConfig={"candidateCount": 3})
