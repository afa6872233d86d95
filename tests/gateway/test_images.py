"""Images: refused in each API's own words where token ids are sent; where the engine chats, they get to it as they
came, and what it says it read is what is recorded."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from polar.contract.task import BuilderSpec
from polar.engines.openai import OpenAIEngine
from polar.gateway.backends import ChatBackend
from polar.gateway.images import LEFT_OUT
from polar.trajectories.assemble import assemble
from tests.engines.openai.wire import MODELS, Reply, Wire, sse, whole, wire_server
from tests.gateway.conftest import World
from tests.support.script import Step

DATA = "iVBORw0KGgo="
INLINE = f"data:image/png;base64,{DATA}"
REMOTE = "https://example.test/a.png"
PAD = 900
"""The id that stands for a piece of an image."""

ANTHROPIC = [
    {"type": "text", "text": "look"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
    {"type": "image", "source": {"type": "url", "url": REMOTE}},
]
OPENAI = [
    {"type": "text", "text": "look"},
    *({"type": "image_url", "image_url": {"url": u}} for u in (INLINE, REMOTE)),
]
RESPONSES = [
    {"type": "input_text", "text": "look"},
    *({"type": "input_image", "image_url": u} for u in (INLINE, REMOTE)),
]
GEMINI = [
    {"text": "look"},
    {"inlineData": {"mimeType": "image/png", "data": DATA}},
    {"fileData": {"mimeType": "image/png", "fileUri": REMOTE}},
]
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai_chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": OPENAI}]}),
    "anthropic": ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": ANTHROPIC}]}),
    "responses": ("/v1/responses", {"input": [{"role": "user", "content": RESPONSES}]}),
    "gemini": ("/v1beta/models/m:generateContent", {"contents": [{"role": "user", "parts": GEMINI}]}),
}


async def post(world: World, path: str, body: dict[str, Any], *, stream: bool = False) -> tuple[int, Any]:
    """Status and body; of a stream only the status, unless that is an error."""
    if stream and ":generateContent" in path:
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
    elif "v1beta" not in path:
        body = {"model": "m", "stream": stream, **body}
    headers = {"Authorization": f"Bearer {world.session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(world.node.server.url + path, json=body) as answer:
            return answer.status, await answer.json() if not stream or answer.status != 200 else await answer.read()


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_where_token_ids_are_sent_an_image_is_refused_with_the_way_out(
    make_world, dialect, stream, mode
) -> None:
    world: World = await make_world([], mode=mode)
    status, told = await post(world, *DIALECTS[dialect], stream=stream)
    assert status == 400
    error = told["error"]
    assert "start Polar with --mode chat" in error["message"]
    if dialect == "anthropic":
        assert (told["type"], error["type"]) == ("error", "invalid_request_error")
    elif dialect == "gemini":
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    else:
        assert error["type"] == "invalid_request_error"
    assert not world.model.log.generations


TOOL_RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": ANTHROPIC}]},
            ],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t1", "output": RESPONSES},
            ]
        },
    ),
    "openai_chat": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "see below"},
                {"role": "user", "content": OPENAI},
            ]
        },
    ),
    "gemini": (
        "/v1beta/models/m:generateContent",
        {
            "contents": [
                {"role": "user", "parts": [{"text": "hi"}]},
                {"role": "model", "parts": [{"functionCall": {"name": "look", "args": {}}}]},
                {
                    "role": "user",
                    "parts": [{"functionResponse": {"name": "look", "response": {"output": "see below"}}}, *GEMINI],
                },
            ]
        },
    ),
}
"""An image that a tool brought, where the harnesses put it."""


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
@pytest.mark.parametrize("dialect", TOOL_RESULTS)
async def test_an_image_that_a_tool_brought_is_left_out_and_the_model_is_told(make_world, dialect, mode) -> None:
    world: World = await make_world([Step(text="I can't see it.")] * 3, mode=mode)
    status, told = await post(world, *TOOL_RESULTS[dialect])
    assert (status, "I can't see it." in json.dumps(told)) == (200, True)
    (generation,) = world.model.log.generations
    prompt = str(world.model.tokenizer.decode(generation.context_ids))
    assert prompt.count(LEFT_OUT) == 2
    (completion,) = await world.node.store.completions(world.session.session_id)
    assert any("images of tool results were left out" in line for line in completion.metadata["warnings"])
    (trace,) = assemble([completion], BuilderSpec(), provenance={}, policy_version=None).traces
    assert trace.images == ()
    assert LEFT_OUT in str(trace.prompt_messages)
    assert DATA not in str(trace.prompt_messages)


def reply(prompt: list[int], kind: str, stream: bool) -> Reply:
    """One of an engine that chats, as vLLM or SGLang writes it."""
    part: dict[str, Any] = {"role": "assistant", "content": "A cat."}
    entries = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
    choice = {"index": 0, "delta" if stream else "message": part, "logprobs": {"content": entries}}
    choice["finish_reason"] = "stop"
    usage = {"prompt_tokens": len(prompt), "completion_tokens": 2}
    if kind == "vllm":
        event = {"choices": [choice | {"token_ids": [5, 2]}], "prompt_token_ids": prompt, "usage": usage}
        return Reply([sse(event)]) if stream else whole(event)
    ids = {"sglext": {"input_ids": prompt, "output_ids": [[5, 2]]}}
    if stream:
        return Reply([sse({"choices": [choice]}, {"choices": [], **ids}, {"choices": [], "usage": usage})])
    return whole({"choices": [choice], "usage": usage, **ids})


async def served(world: World, wire: Wire, kind: str) -> OpenAIEngine:
    """The world with an engine of that kind, which chats."""
    wire.models = {"data": [MODELS | {"owned_by": kind}]}
    engine = OpenAIEngine(wire.url)
    await engine.start()
    world.node.gateway.pipeline.backend = ChatBackend(engine)
    return engine


def urls(message: dict[str, Any]) -> list[str]:
    """The images of a message that the engine got."""
    content = message["content"]
    return (
        [] if not isinstance(content, list) else [p["image_url"]["url"] for p in content if p["type"] == "image_url"]
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_engine_that_chats_gets_images_as_they_came(make_world, dialect, stream, kind) -> None:
    world: World = await make_world([])
    prompt = [1, PAD, PAD, PAD, 7]
    async with wire_server(reply(prompt, kind, stream)) as wire:
        engine = await served(world, wire, kind)
        status, _ = await post(world, *DIALECTS[dialect], stream=stream)
        await engine.close()
    assert status == 200
    [message] = wire.bodies[0]["messages"]
    assert urls(message) == [INLINE, REMOTE]
    assert message["content"][0] == {"type": "text", "text": "look"}
    [completion] = await world.recorded(1)
    assert (completion.outcome, world.prompt(completion)) == ("ok", prompt)
    [trace] = assemble([completion], BuilderSpec()).traces
    assert trace.images == (INLINE, REMOTE)


async def test_an_image_in_a_tool_result_gets_to_the_engine(make_world) -> None:
    world: World = await make_world([])
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": ANTHROPIC}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    async with wire_server(reply([1, PAD], "vllm", False)) as wire:
        engine = await served(world, wire, "vllm")
        assert (await post(world, "/v1/messages", {"max_tokens": 9, "messages": messages}))[0] == 200
        await engine.close()
    assert [url for message in wire.bodies[0]["messages"] for url in urls(message)] == [INLINE, REMOTE]


@pytest.mark.parametrize(
    ("image", "second", "traces", "split"),
    [
        (INLINE, [1, PAD, PAD, 7, 5, 2, 8, 9], 1, None),
        (INLINE, [1, PAD, PAD, PAD, 7, 5, 2, 8, 9], 2, "retokenized"),  # read as more pieces the second time
        (REMOTE, [1, PAD, PAD, 7, 5, 2, 8, 9], 2, "new_conversation"),  # another image, and the same ids
    ],
    ids=["same", "other-pieces", "other-image"],
)
async def test_turns_merge_only_behind_the_same_images_read_the_same(
    make_world, image, second, traces, split
) -> None:
    world: World = await make_world([])

    def looked(url: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    more = [{"role": "assistant", "content": "A cat."}, {"role": "user", "content": "sure?"}]
    first = [1, PAD, PAD, 7]
    async with wire_server(reply(first, "vllm", False), reply(second, "vllm", False)) as wire:
        engine = await served(world, wire, "vllm")
        for messages in ([looked(INLINE)], [looked(image), *more]):
            assert (await post(world, "/v1/chat/completions", {"messages": messages}))[0] == 200
        await engine.close()
    completions = await world.recorded(2)
    assert [world.prompt(completion) for completion in completions] == [first, second]
    trajectory = assemble(completions, BuilderSpec())
    assert len(trajectory.traces) == traces
    found = [each["reason"] for each in trajectory.metadata["reconstruction"]["splits"]]
    assert found == ([] if split is None else [split])
    for trace in trajectory.traces:
        assert int(trace.loss_mask.sum()) == 2 * len(trace.completion_ids)
