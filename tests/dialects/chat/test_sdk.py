"""The helpers of the vendor's own SDK, blocking and not: what they make of replies and streams, in each API."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from pydantic import BaseModel

from tests.gateway.conftest import World, make_world, tiny_model
from tests.support.script import Conversation, Step

__all__ = ["make_world", "tiny_model"]

THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
CALLS = f"{CALL}\n" + CALL.replace('"a"', '"b"')


class Look(BaseModel):
    at: str


class Capital(BaseModel):
    city: str


LOOK: Any = openai.pydantic_function_tool(Look, name="look")
FLAT: Any = {"type": "function", **LOOK["function"]}
FOUND = [Look(at="a"), Look(at="b")]


def say(conversation: Conversation) -> Step:
    return Step(text='{"city": "Paris"}' if "capital" in conversation.last else f"{THOUGHT}I look.\n{CALLS}")


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_what_is_parsed_is_what_was_sampled(make_world, mode) -> None:
    world: World = await make_world(say, mode=mode)
    client = world.client()
    chat, responses = client.chat.completions, client.responses

    parsed = await chat.parse(model="m", messages=user("capital?"), response_format=Capital)
    assert parsed.choices[0].message.parsed == Capital(city="Paris")
    called = await chat.parse(model="m", messages=user("look"), tools=[LOOK])
    calls = called.choices[0].message.tool_calls
    assert [call.function.parsed_arguments for call in calls or ()] == FOUND
    answered = await responses.parse(model="m", input="capital?", text_format=Capital)
    assert answered.output_parsed == Capital(city="Paris")
    items = (await responses.parse(model="m", input="look", tools=[FLAT])).output
    assert [item.parsed_arguments for item in items if item.type == "function_call"] == [{"at": "a"}, {"at": "b"}]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_streams_are_put_together_by_the_helpers(make_world, mode) -> None:
    world: World = await make_world(say, mode=mode)
    client = world.client()
    options: Any = {"model": "m", "tools": [LOOK], "logprobs": True, "stream_options": {"include_usage": True}}
    async with client.chat.completions.stream(messages=user("look"), **options) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    [choice] = final.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert [call.function.parsed_arguments for call in choice.message.tool_calls or ()] == FOUND
    [completion] = await world.completions()
    assert choice.logprobs is not None
    assert [one.logprob for one in choice.logprobs.content or ()] == completion.logprobs.tolist()
    assert final.usage is not None
    assert final.usage.completion_tokens == len(completion.response_ids)

    async with client.responses.stream(model="m", input="capital?", text_format=Capital) as events:
        numbers = [event.sequence_number async for event in events if hasattr(event, "sequence_number")]
        reply = await events.get_final_response()
    assert numbers == sorted(set(numbers))
    assert reply.output_parsed == Capital(city="Paris")


async def test_the_blocking_helpers_see_the_same(make_world) -> None:
    world: World = await make_world(say)

    def ask() -> list[Any]:
        client = openai.OpenAI(base_url=f"{world.node.server.url}/v1", api_key=world.session.key, max_retries=0)
        parsed = client.chat.completions.parse(model="m", messages=user("capital?"), response_format=Capital)
        with client.chat.completions.stream(model="m", messages=user("look"), tools=[LOOK]) as chat:
            calls = chat.until_done().get_final_completion().choices[0].message.tool_calls
        with client.responses.stream(model="m", input="capital?", text_format=Capital) as responses:
            answered = responses.until_done().get_final_response()
        return [
            parsed.choices[0].message.parsed,
            [call.function.parsed_arguments for call in calls or ()],
            answered.output_parsed,
        ]

    assert await asyncio.to_thread(ask) == [Capital(city="Paris"), FOUND, Capital(city="Paris")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("hi")}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 64}),
        ("/v1/responses", {"input": "hi"}),
    ],
    ids=["chat", "completions", "responses"],
)
@pytest.mark.parametrize("mode", ["tito", "vllm"])
async def test_a_stream_that_breaks_ends_with_an_error_and_a_cut_in_each_api(make_world, mode, path, body) -> None:
    world: World = await make_world([Step(text="one two three four five", cut_after=2)], mode=mode)
    received = b""
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {world.session.key}"}) as http:
        async with http.post(f"{world.node.server.url}{path}", json={"model": "m", "stream": True, **body}) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):
                async for piece in reply.content.iter_any():
                    received += piece
    last = received.strip().split(b"\n\n")[-1]
    assert b'"error"' in last
    assert (b"response.failed" in last) is path.endswith("responses")
    assert b"[DONE]" not in received
    [completion] = await world.recorded(1)
    assert completion.outcome == "engine_error"


async def test_a_warning_that_every_call_has_is_in_the_log_once(make_world, caplog) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    for text in ("one", "two", "three"):
        await world.client().chat.completions.create(model="m", messages=user(text), verbosity="low")
    assert [record.getMessage().count("verbosity") for record in caplog.records].count(1) == 1
    told = [completion.metadata["warnings"] for completion in await world.completions()]
    assert told == [["verbosity was passed over: nothing here reads it"]] * 3
