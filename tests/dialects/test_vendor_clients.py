"""The vendors' own clients, blocking and not, streaming and not, side by side: replies, models, errors by class, and
what each of them does by itself when a connection breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import google.genai
import openai
import pytest
from google.genai import errors, types

from tests.gateway.conftest import World, make_world, tiny_model
from tests.support.script import Step

__all__ = ["make_world", "tiny_model"]

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
CALLS = CALL + "\n" + CALL.replace('"a"', '"b"')
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
FUNCTION: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
GOOGLE_TOOLS: Any = [{"function_declarations": [{"name": "look", "parameters_json_schema": SCHEMA}]}]

Ask = Callable[[str, str, int, bool], Any]
"""``(url, key, retries, tools)`` to the text of a reply, or with tools to the ``at`` of each of its calls."""


async def openai_async(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    options: Any = {"tools": [FUNCTION]} if tools else {}
    reply = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
    message = reply.choices[0].message
    return [call.function.arguments for call in message.tool_calls or ()] if tools else message.content


async def openai_async_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    options: Any = {"tools": [FUNCTION]} if tools else {}
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **options)
    return _openai_pieces([chunk async for chunk in stream], tools)


def openai_sync(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    options: Any = {"tools": [FUNCTION]} if tools else {}
    message = client.chat.completions.create(model="m", messages=MESSAGES, **options).choices[0].message
    return [call.function.arguments for call in message.tool_calls or ()] if tools else message.content


def openai_sync_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    options: Any = {"tools": [FUNCTION]} if tools else {}
    stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **options)
    return _openai_pieces(list(stream), tools)


def _openai_pieces(chunks: list[Any], tools: bool) -> Any:
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    calls: dict[int, str] = {}
    for delta in deltas:
        for call in delta.tool_calls or ():
            calls[call.index] = calls.get(call.index, "") + (call.function.arguments or "")
    return list(calls.values()) if tools else "".join(delta.content or "" for delta in deltas)


async def responses_async(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    listed: Any = [{"type": "function", "name": "look", "parameters": SCHEMA}] if tools else []
    async with client.responses.stream(model="m", input="hi", tools=listed) as stream:
        return _response(await stream.get_final_response(), tools)


def responses_sync(url: str, key: str, retries: int, tools: bool) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)
    listed: Any = [{"type": "function", "name": "look", "parameters": SCHEMA}] if tools else []
    return _response(client.responses.create(model="m", input="hi", tools=listed), tools)


def _response(reply: Any, tools: bool) -> Any:
    return [item.arguments for item in reply.output if item.type == "function_call"] if tools else reply.output_text


async def anthropic_async(url: str, key: str, retries: int, tools: bool) -> Any:
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=retries)
    return _blocks(await client.messages.create(**_anthropic(tools)), tools)


async def anthropic_async_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=retries)
    async with client.messages.stream(**_anthropic(tools)) as stream:
        return _blocks(await stream.get_final_message(), tools)


def anthropic_sync(url: str, key: str, retries: int, tools: bool) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=retries)
    return _blocks(client.messages.create(**_anthropic(tools)), tools)


def anthropic_sync_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=retries)
    with client.messages.stream(**_anthropic(tools)) as stream:
        return _blocks(stream.get_final_message(), tools)


def _anthropic(tools: bool) -> Any:
    listed: Any = {"tools": [{"name": "look", "input_schema": SCHEMA}]} if tools else {}
    return {"model": "m", "max_tokens": 99, "messages": MESSAGES, **listed}


def _blocks(reply: Any, tools: bool) -> Any:
    if tools:
        return [json.dumps(block.input) for block in reply.content if block.type == "tool_use"]
    return "".join(block.text for block in reply.content if block.type == "text")


async def google_async(url: str, key: str, retries: int, tools: bool) -> Any:
    client = _google(url, key, retries)
    return _parts([await client.aio.models.generate_content(**_google_request(tools))], tools)


async def google_async_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = _google(url, key, retries)
    stream = await client.aio.models.generate_content_stream(**_google_request(tools))
    return _parts([chunk async for chunk in stream], tools)


def google_sync(url: str, key: str, retries: int, tools: bool) -> Any:
    client = _google(url, key, retries)  # it closes itself when nobody holds it
    return _parts([client.models.generate_content(**_google_request(tools))], tools)


def google_sync_stream(url: str, key: str, retries: int, tools: bool) -> Any:
    client = _google(url, key, retries)
    return _parts(list(client.models.generate_content_stream(**_google_request(tools))), tools)


def _google(url: str, key: str, retries: int) -> google.genai.Client:
    again = types.HttpRetryOptions(attempts=retries + 1, initial_delay=0.01)
    return google.genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, retry_options=again))


def _google_request(tools: bool) -> Any:
    config: Any = {"tools": GOOGLE_TOOLS, "automatic_function_calling": {"disable": True}} if tools else {}
    return {"model": "m", "contents": "hi", "config": config}


def _parts(chunks: list[Any], tools: bool) -> Any:
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    if tools:
        return [json.dumps(part.function_call.args) for part in parts if part.function_call]
    return "".join(part.text or "" for part in parts)


CLIENTS: list[Ask] = [
    openai_async,
    openai_async_stream,
    openai_sync,
    openai_sync_stream,
    responses_async,
    responses_sync,
    anthropic_async,
    anthropic_async_stream,
    anthropic_sync,
    anthropic_sync_stream,
    google_async,
    google_async_stream,
    google_sync,
    google_sync_stream,
]
EVERY = pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)


async def run(ask: Ask, url: str, key: str, *, retries: int = 0, tools: bool = False) -> Any:
    if asyncio.iscoroutinefunction(ask):
        return await ask(url, key, retries, tools)
    return await asyncio.to_thread(ask, url, key, retries, tools)


@EVERY
async def test_a_reply(make_world, ask) -> None:
    world: World = await make_world([Step(text="Fine, thank you.")])
    assert await run(ask, world.node.server.url, world.session.key) == "Fine, thank you."
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"


@EVERY
async def test_two_calls_in_one_reply_reach_the_client_apart(make_world, ask) -> None:
    """D10."""
    world: World = await make_world([Step(text=CALLS)])
    calls = await run(ask, world.node.server.url, world.session.key, tools=True)
    assert calls == ['{"at": "a"}', '{"at": "b"}']


ERRORS: list[tuple[str, int, Any, Any, Any]] = [
    ("auth", 401, openai.AuthenticationError, anthropic.AuthenticationError, errors.ClientError),
    ("gone", 410, openai.APIStatusError, anthropic.APIStatusError, errors.ClientError),
    ("context", 400, openai.BadRequestError, anthropic.BadRequestError, errors.ClientError),
    ("refused", 400, openai.BadRequestError, anthropic.BadRequestError, errors.ClientError),
    ("busy", 503, openai.InternalServerError, anthropic.InternalServerError, errors.ServerError),
    ("broken", 502, openai.InternalServerError, anthropic.InternalServerError, errors.ServerError),
]


@EVERY
@pytest.mark.parametrize("what", ERRORS, ids=lambda what: what[0])
async def test_an_error_is_of_the_class_that_the_client_has_for_it(make_world, ask, what) -> None:
    """C8, D17."""
    name, status, *classes = what
    engine = {"refused": 400, "busy": 429, "broken": 500}.get(name)
    step = Step(text="Fine.", status=engine, error="the engine says no")
    world: World = await make_world([step], max_model_len=4 if name == "context" else 32768)
    key = "sk-wrong" if name == "auth" else world.session.key
    if name == "gone":
        await world.node.gateway.close(world.session)
    vendor = ask.__name__.split("_")[0].replace("responses", "openai")
    with pytest.raises(classes[["openai", "anthropic", "google"].index(vendor)]) as caught:
        await run(ask, world.node.server.url, key)
    error: Any = caught.value
    assert (error.code if vendor == "google" else error.status_code) == status
    if name == "context":
        words = {
            "openai": "maximum context length is",
            "anthropic": "prompt is too long: ",
            "google": "exceeds the maximum number of tokens allowed",
        }
        assert words[vendor] in str(error)
        assert vendor != "openai" or error.code == "context_length_exceeded"


async def test_models_are_listed_and_named(make_world) -> None:
    world: World = await make_world([])
    url, key = world.node.server.url, world.session.key

    def ask() -> list[list[str]]:
        one = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
        two = anthropic.Anthropic(base_url=url, api_key=key)
        three = _google(url, key, 0)
        return [
            [model.id for model in one.models.list()] + [one.models.retrieve("any").id],
            [model.id for model in two.models.list()] + [two.models.retrieve("any").id],
            [str(model.name) for model in three.models.list()] + [str(three.models.get(model="any").name)],
        ]

    assert await asyncio.to_thread(ask) == [
        ["scripted", "any"],
        ["scripted", "any"],
        ["models/scripted", "models/any"],
    ]


@pytest.mark.parametrize("vendor", ["openai", "anthropic", "google"])
async def test_a_route_that_is_not_served_is_refused_in_the_vendors_shape(make_world, vendor) -> None:
    world: World = await make_world([])
    url, key = world.node.server.url, world.session.key

    def ask() -> Any:
        if vendor == "openai":
            return openai.OpenAI(base_url=f"{url}/v1", api_key=key).embeddings.create(model="m", input="x")
        if vendor == "anthropic":
            return anthropic.Anthropic(base_url=url, api_key=key).messages.batches.create(requests=[])
        client = _google(url, key, 0)  # it closes itself when nobody holds it
        return client.models.embed_content(model="m", contents="x")

    refused: Any = {"openai": openai, "anthropic": anthropic}.get(vendor)
    with pytest.raises(refused.NotFoundError if refused else errors.ClientError) as caught:
        await asyncio.to_thread(ask)
    error: Any = caught.value
    if vendor == "openai":
        assert (error.status_code, error.code) == (404, "not_found")
    elif vendor == "anthropic":
        assert (error.body["type"], error.body["error"]["type"]) == ("error", "not_found_error")
    else:
        assert (error.code, error.status) == (404, "NOT_FOUND")


async def test_counts_are_the_same_for_every_client_that_can_ask(make_world) -> None:
    """D16."""
    world: World = await make_world([Step(text="Fine.")])
    url, key = world.node.server.url, world.session.key

    def ask() -> set[int | None]:
        google_client = _google(url, key, 0)
        return {
            anthropic.Anthropic(base_url=url, api_key=key)
            .messages.count_tokens(model="m", messages=MESSAGES)
            .input_tokens,
            google_client.models.count_tokens(model="m", contents="hi").total_tokens,
            openai.OpenAI(base_url=f"{url}/v1", api_key=key).responses.input_tokens.count(input="hi").input_tokens,
        }

    [count] = await asyncio.to_thread(ask)
    assert await world.completions() == []
    await run(openai_async, url, key)
    assert count == len(world.model.log.generations[0].context_ids)


# ---- broken connections ----------------------------------------------------------------------------------


@asynccontextmanager
async def cutting(world: World) -> AsyncIterator[str]:
    """An address before the gateway that cuts the first connection once the engine is sampling."""
    host, _, port = world.node.server.url.removeprefix("http://").partition(":")
    connections = 0
    tasks: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        behind, to_gateway = await asyncio.open_connection(host, int(port))
        ways = [asyncio.create_task(pipe(reader, to_gateway)), asyncio.create_task(pipe(behind, writer))]
        tasks.update(ways)
        if connections == 1:
            await world.model.log.wait_for(lambda log: bool(log) and len(log[0].sampled_ids) >= 2)
            for way in ways:
                way.cancel()
            to_gateway.transport.abort()
            writer.transport.abort()
            return
        while not any(call.waiting for call in world.session.calls):
            await asyncio.sleep(0.005)
        world.model.release()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


RETRYING = [ask for ask in CLIENTS if not ask.__name__.startswith("google")]


@pytest.mark.parametrize("ask", RETRYING, ids=lambda ask: ask.__name__)
async def test_a_client_that_tries_again_after_a_broken_connection_gets_the_one_generation(
    make_world, monkeypatch, ask
) -> None:
    """C1, C4: the SDK sends the same body again by itself; it is one call, one generation, one record. What was
    streamed by then is lost with the connection, so a stream is cut before its first byte here."""
    monkeypatch.setattr("polar.gateway.app.FIRST_BYTE", 60.0)
    world: World = await make_world([Step(text="one two three four", hold_after=2)], buffer_replies=True)
    async with cutting(world) as url:
        assert await run(ask, url, world.session.key, retries=2) == "one two three four"
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"
    assert len(world.model.log.generations) == 1


async def test_googles_client_says_so_and_asking_again_is_the_one_generation(make_world, monkeypatch) -> None:
    monkeypatch.setattr("polar.gateway.app.FIRST_BYTE", 60.0)
    world: World = await make_world([Step(text="one two three four", hold_after=2)], grace=60.0)
    async with cutting(world) as url:
        with pytest.raises(Exception, match=r"(?i)disconnected|reset|closed"):
            await run(google_sync, url, world.session.key)
        while any(call.waiting for call in world.session.calls):
            await asyncio.sleep(0.005)
        assert await run(google_sync, url, world.session.key) == "one two three four"
    await world.recorded(1)
