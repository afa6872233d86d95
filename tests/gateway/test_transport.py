"""Bodies, keys and connections as harnesses in the field have them, whatever the API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from polar.gateway import app
from tests.gateway.conftest import World
from tests.support.script import Step

MESSAGES: Any = [{"role": "user", "content": "hi"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "plain": ("/v1/completions", {"prompt": "hi"}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "anthropic": ("/v1/messages", {"max_tokens": 9, "messages": MESSAGES}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}),
}
EVERY = pytest.mark.parametrize("api", CALLS)


async def post(world: World, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key or world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(world.node.server.url + path, json={"model": "m", **body}) as response:
            return response.status, await response.json()


@EVERY
async def test_a_body_over_the_limit_is_refused_in_shape(make_world, api) -> None:
    """E2: the limit is 256 MiB; here it is small, so that the test is."""
    assert app.Limits().body == 256 * 1024 * 1024
    world: World = await make_world([])
    world.node.gateway._limits = app.Limits(body=10_000)
    path, body = CALLS[api]
    status, reply = await post(world, path, {**body, "padding": "x" * 10_000})
    assert status == 413
    assert "10000 bytes" in reply["error"]["message"]


async def test_a_body_of_screenshots_is_served_and_holds_up_nobody(make_world) -> None:
    """E2: tens of megabytes, read apart from the event loop."""
    world: World = await make_world(lambda _: Step(text="A cat."), mode="chat")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 40_000_000}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    large = asyncio.create_task(post(world, "/v1/chat/completions", {"messages": messages}))
    small = [asyncio.create_task(post(world, *CALLS["chat"])) for _ in range(3)]
    assert [status for status, _ in await asyncio.gather(*small)] == [200] * 3
    assert (await large)[0] == 200
    await world.recorded(4)


@EVERY
async def test_headers_and_a_sign_of_life_come_before_the_first_token(make_world, monkeypatch, api) -> None:
    """E1: idle limits of harnesses are counted from the last byte."""
    monkeypatch.setattr(app, "FIRST_BYTE", 0.01)
    monkeypatch.setattr(app, "KEEPALIVE", 0.01)
    world: World = await make_world([Step(text="Fine.", hold_after=0)])
    path, body = CALLS[api]
    path = path.replace("generateContent", "streamGenerateContent?alt=sse")
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = world.node.server.url + path
        async with http.post(url, json={"model": "m", "stream": True, **body}) as response:
            assert response.status == 200
            life = [await response.content.readuntil(b"\n\n") for _ in range(2)]
            assert all(line.startswith((b": keepalive", b"data: {", b"event: ping")) for line in life)
            world.model.release()
            assert await response.content.read()
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"


@EVERY
@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_key_that_is_none_is_refused_and_one_in_the_path_is_good(make_world, api, mode) -> None:
    """E10, E11: never a default session."""
    if (api, mode) == ("plain", "chat"):
        pytest.skip("plain prompts are not served in chat mode")
    world: World = await make_world([Step(text="Fine.")], mode=mode)
    path, body = CALLS[api]
    assert (await post(world, path, body, "sk-wrong"))[0] == 401
    assert (await post(world, f"/s/sk-wrong{path}", body))[0] == 401
    assert await world.completions() == []
    assert (await post(world, f"/s/{world.session.key}{path}", body, "sk-wrong"))[0] == 200
    await world.recorded(1)


@EVERY
async def test_a_late_call_to_a_closed_session_is_refused_and_not_recorded(make_world, api) -> None:
    """E5."""
    world: World = await make_world([Step(text="Fine.")])
    await world.node.gateway.close(world.session)
    assert (await post(world, *CALLS[api]))[0] == 410
    world.node.gateway.forget(world.session)
    assert (await post(world, *CALLS[api]))[0] == 401
    assert await world.completions() == []


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_system_messages_at_the_start_and_in_the_middle_reach_the_model_in_their_place(
    make_world, mode
) -> None:
    """D7: several at the start, by two names, and one between."""
    world: World = await make_world(lambda _: Step(text="Fine."), mode=mode)
    messages = [
        {"role": "system", "content": "FIRST."},
        {"role": "developer", "content": "SECOND."},
        {"role": "user", "content": "THIRD."},
        {"role": "assistant", "content": "FOURTH."},
        {"role": "developer", "content": "FIFTH."},
        {"role": "user", "content": "SIXTH."},
    ]
    assert (await post(world, "/v1/chat/completions", {"messages": messages}))[0] == 200
    prompt = world.model.tokenizer.decode(world.model.log.generations[0].context_ids)
    at = [prompt.index(message["content"]) for message in messages]
    assert at == sorted(at)


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"tools": [], "tool_choice": "required"}),
        ("responses", {"tools": [], "tool_choice": "required"}),
        ("anthropic", {"tools": [], "tool_choice": {"type": "any"}}),
        ("gemini", {"tools": [], "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}),
    ],
)
@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_choice_among_no_tools_is_no_choice(make_world, api, fields, mode) -> None:
    """D23: the compaction call of Claude Code."""
    world: World = await make_world([Step(text="Fine.")], mode=mode)
    path, body = CALLS[api]
    assert (await post(world, path, {**body, **fields}))[0] == 200
    assert "tool_choice" not in world.model.log.generations[0].request
    [completion] = await world.completions()
    assert "warnings" not in completion.metadata


async def test_the_billing_line_of_claude_code_never_reaches_the_model(make_world) -> None:
    """B5: it differs with every call; in a user's message the same words are the user's."""
    world: World = await make_world(lambda _: Step(text="Fine."))
    messages: Any = [{"role": "user", "content": "x-anthropic-billing-header: mine"}]
    for mark in ("aaa", "bbb"):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{mark}; cch={mark};"},
            {"type": "text", "text": "You are an agent."},
        ]
        status, reply = await post(world, "/v1/messages", {"max_tokens": 9, "system": system, "messages": messages})
        assert status == 200
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "and?"}]
    one, two = await world.completions()
    assert (two.parent_id, two.split) == (one.completion_id, None)
    prompt = world.model.tokenizer.decode(world.prompt(two))
    assert "cch=" not in prompt
    assert "x-anthropic-billing-header: mine" in prompt


async def test_every_event_of_a_responses_stream_says_its_type_and_nests_its_object(make_world) -> None:
    """D1, D2: in strict order, as Codex reads it."""
    world: World = await make_world([Step(text="Fine.")])
    headers = {"authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        url = f"{world.node.server.url}/v1/responses"
        async with http.post(url, json={"model": "m", "input": "hi", "stream": True}) as response:
            blocks = (await response.read()).decode().split("\n\n")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks if "data: " in block]
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    for event in events:
        if event["type"] in ("response.created", "response.in_progress", "response.completed"):
            assert event["response"]["object"] == "response"
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


@EVERY
async def test_a_compressed_body_is_refused_in_shape_and_by_name(make_world, api) -> None:
    world: World = await make_world([Step(text="Fine.")])
    path, body = CALLS[api]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {world.session.key}"}) as http:
        for encoding, status in (("gzip", 400), ("zstd", 400), ("identity", 200)):
            headers = {"content-encoding": encoding}
            async with http.post(world.node.server.url + path, json={"model": "m", **body}, headers=headers) as reply:
                assert reply.status == status
                assert status == 200 or f"Content-Encoding '{encoding}'" in (await reply.json())["error"]["message"]
    await world.recorded(1)


@EVERY
async def test_a_fault_of_ours_is_an_error_in_shape_and_in_the_log(make_world, api, monkeypatch, caplog) -> None:
    world: World = await make_world([Step(text="Fine.")])
    monkeypatch.setattr(app, "_read", lambda *_: 1 / 0)
    status, reply = await post(world, *CALLS[api])
    assert status == 500
    assert "division by zero" in reply["error"]["message"]
    assert "ZeroDivisionError" in caplog.text
