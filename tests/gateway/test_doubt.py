"""A reply whose tokens are not what they should be: its text is served, and it is not trained, for a reason."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from polar.engines.base import TokenChunk
from polar.engines.openai import OpenAIEngine
from polar.gateway.backends import ChatBackend
from tests.engines.openai.wire import Reply, sse, whole, wire_server
from tests.gateway.conftest import World
from tests.support.script import Step

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
USAGE = {"prompt_tokens": 2, "completion_tokens": 2}
ENTRIES = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]


def reply(delta: str = "message", **changes: Any) -> dict[str, Any]:
    """A reply of vLLM's chat route, or its one event."""
    choice = {
        "index": 0,
        delta: {"role": "assistant", "content": "Paris."},
        "logprobs": {"content": ENTRIES},
        "finish_reason": "stop",
        "token_ids": [5, 2],
    }
    top = {"prompt_token_ids": [1, 2], "usage": USAGE}
    top |= {name: changes.pop(name) for name in list(changes) if name not in choice}
    return {"choices": [choice | changes], **top}


async def served(world: World, *events: dict[str, Any], stream: bool = False) -> tuple[list[str], list[Any]]:
    """What the client sees of replies of an engine that chats, and what is recorded."""
    replies = [Reply([sse(event)]) if stream else whole(event) for event in events]
    async with wire_server(*replies) as wire:
        engine = OpenAIEngine(wire.url)
        await engine.start()
        world.node.gateway.pipeline.backend = ChatBackend(engine)
        seen = []
        async with world.client() as client:
            for _ in events:
                if stream:
                    pieces = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
                    seen.append("".join([piece.choices[0].delta.content or "" async for piece in pieces]))
                else:
                    whole_ = await client.chat.completions.create(model="m", messages=MESSAGES)
                    seen.append(whole_.choices[0].message.content or "")
        await engine.close()
    return seen, await world.recorded(len(events))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({"token_ids": [5, None]}, "token_mismatch", "token_ids[1]"),
        ({"token_ids": ["5", "2"]}, "token_mismatch", "token_ids[0]"),
        ({"token_ids": [5, 2**40]}, "token_mismatch", "token_ids[1]"),
        ({"prompt_token_ids": [1, None]}, "token_mismatch", "prompt ids"),
        ({"prompt_token_ids": [1, 2**31]}, "token_mismatch", "prompt ids"),
        ({"usage": {"prompt_tokens": "2"}}, "token_mismatch", "usage"),
        ({"token_ids": [5], "usage": None}, "logprob_missing", "1 ids, but 2 logprobs"),
        ({"metadata": {"weight_version": 7}}, "ok", None),
    ],
)
async def test_odd_values_keep_nobody_from_the_text(make_world, stream, changes, outcome, words) -> None:
    world: World = await make_world([])
    event = reply("delta" if stream else "message", **changes)
    seen, [completion] = await served(world, event, stream=stream)
    assert seen == ["Paris."]
    assert completion.outcome == outcome
    assert (words or "") in (completion.detail or "")
    assert completion.reply.content == "Paris."
    assert world.session.broken is None
    if "metadata" in changes:
        assert [(span.version, span.start, span.end) for span in completion.weight_spans] == [("7", 0, 2)]


async def test_a_session_goes_on_after_a_reply_in_doubt(make_world) -> None:
    world: World = await make_world([])
    seen, completions = await served(world, reply(token_ids=[5, None]), reply())
    assert seen == ["Paris.", "Paris."]
    assert [completion.outcome for completion in completions] == ["token_mismatch", "ok"]


async def test_without_usage_nothing_counts_the_ids_and_one_line_says_so(make_world, caplog) -> None:
    world: World = await make_world([])
    with caplog.at_level(logging.WARNING, "polar.gateway"):
        _, completions = await served(world, reply(), reply(usage=None), reply(usage={}))
    counted, *others = completions
    assert "warnings" not in counted.metadata
    for completion in others:
        assert completion.outcome == "ok"
        assert "sends no usage" in completion.metadata["warnings"][0]
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 2)
    assert sum("sends no usage" in record.getMessage() for record in caplog.records) == 1


def without_last_id(world: World, **changes: Any) -> None:
    """Have the engine lose the id that ends a reply, and its logprob; ``changes`` are of its last chunk."""
    generate = world.node.engine.generate

    async def lossy(*args: Any, **options: Any) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in generate(*args, **options):
            last = chunk.finish_reason is not None
            yield replace(chunk, ids=chunk.ids[:-1], logprobs=chunk.logprobs[:-1], **changes) if last else chunk

    world.node.engine.generate = lossy


async def ask(world: World, **options: Any) -> str:
    async with world.client() as client:
        found = await client.chat.completions.create(model="m", messages=MESSAGES, **options)
    return found.choices[0].message.content or ""


async def test_a_reply_that_lost_the_id_that_ends_it_is_not_trained(make_world) -> None:
    world: World = await make_world([Step(text="Paris.")])
    without_last_id(world)
    assert await ask(world) == "Paris."
    [completion] = await world.recorded(1)
    assert completion.outcome == "token_mismatch"
    assert "the model ended the reply, but its last id" in completion.detail


async def test_a_reply_cut_at_its_limit_or_at_a_stop_string_needs_no_such_id(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="The capital of France is Paris."))
    await ask(world, max_tokens=2)
    assert await ask(world, stop=["France"]) == "The capital of "
    without_last_id(world, stop_sequence="is")
    await ask(world, stop=["is"])
    assert [completion.outcome for completion in await world.recorded(3)] == ["ok", "ok", "ok"]


async def test_a_stop_string_that_nobody_asked_for_is_no_end(make_world) -> None:
    """SGLang says so where its arithmetic fails, and puts an id that ends a reply in place of what it sampled."""
    world: World = await make_world([Step(text="Paris.")])
    generate = world.node.engine.generate

    async def failing(*args: Any, **options: Any) -> AsyncGenerator[TokenChunk, None]:
        async for chunk in generate(*args, **options):
            yield replace(chunk, stop_sequence="NaN happened") if chunk.finish_reason else chunk

    world.node.engine.generate = failing
    assert await ask(world) == "Paris."
    [completion] = await world.recorded(1)
    assert (completion.outcome, "NaN happened" in completion.detail) == ("token_mismatch", True)
