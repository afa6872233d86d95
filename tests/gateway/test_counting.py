"""Counts in chat mode: the engine's own number where it gives one, else an error in shape; nothing is recorded."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from polar.contract.chat import Chat, Message
from polar.engines.base import EngineError
from polar.engines.openai import OpenAIEngine
from polar.engines.pool import pool_of
from tests.gateway.conftest import World
from tests.support.script import Step
from tests.support.scripted import scripted_engine

MESSAGES = [{"role": "user", "content": "count me"}]
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
COUNTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "anthropic": ("/v1/messages/count_tokens", {"messages": MESSAGES, "system": "Be brief."}, "input_tokens"),
    "anthropic_beta": ("/v1/messages/count_tokens?beta=true", {"messages": MESSAGES}, "input_tokens"),
    "anthropic_tools": (
        "/v1/messages/count_tokens",
        {"messages": MESSAGES, "tools": [{"name": "look", "input_schema": TOOL["parameters"]}]},
        "input_tokens",
    ),
    "gemini": (
        "/v1beta/models/m:countTokens",
        {"contents": [{"role": "user", "parts": [{"text": "count me"}]}]},
        "totalTokens",
    ),
    "responses": ("/v1/responses/input_tokens", {"input": "count me"}, "input_tokens"),
}


async def post(world: World, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(world.node.server.url + path, json={"model": "m", **body}) as response:
            return response.status, await response.json()


@pytest.mark.parametrize("mode", ["tito", "chat"])
@pytest.mark.parametrize("api", COUNTS)
async def test_a_count_is_the_prompt_that_a_call_would_have(make_world, api, mode) -> None:
    """D16."""
    world: World = await make_world([Step(text="Fine.")], mode=mode)
    path, body, field = COUNTS[api]
    status, counted = await post(world, path, body)
    assert status == 200, counted
    assert (await world.completions(), world.model.log.generations) == ([], [])
    call = path.partition("?")[0].replace("/count_tokens", "").replace("/input_tokens", "")
    await post(world, call.replace("countTokens", "generateContent"), {"max_tokens": 9, **body})
    [generation] = world.model.log.generations
    assert counted[field] == len(generation.context_ids)


@pytest.mark.parametrize("api", COUNTS)
async def test_a_server_that_can_not_count_is_an_error_in_shape(make_world, api) -> None:
    world: World = await make_world([], mode="chat")
    world.engine.off = ("/tokenize",)
    path, body, _ = COUNTS[api]
    status, reply = await post(world, path, body)
    assert status == 404
    assert "can't count" in reply["error"]["message"]


async def test_a_conversation_that_the_template_refuses_is_the_clients_fault(make_world) -> None:
    world: World = await make_world([], mode="chat")
    world.engine.refuse = "System message must be at the beginning."
    path, body, _ = COUNTS["anthropic"]
    status, reply = await post(world, path, body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    assert "must be at the beginning" in reply["error"]["message"]


async def test_a_pool_counts_by_any_of_its_servers_and_says_so_where_none_can(tiny_model) -> None:
    async with scripted_engine(tiny_model, []) as one, scripted_engine(tiny_model, []) as two:
        pool: Any = pool_of([OpenAIEngine(one.url), OpenAIEngine(two.url)])
        await pool.start()
        chat = Chat("scripted", (Message("user", "count me"),))
        assert await pool.count(chat) == len(one.model.render(MESSAGES, None, {}))
        one.server.off = two.server.off = ("/tokenize",)
        with pytest.raises(EngineError) as caught:
            await pool.count(chat)
        assert caught.value.status == 404
        await pool.close()
