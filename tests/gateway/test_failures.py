"""Engines that fail, lie or leave things out: the harness gets an error it understands or a reply, and the
record says what happened."""

from __future__ import annotations

import aiohttp
import openai
import pytest

from tests.gateway.conftest import World
from tests.support.script import Step

MESSAGES = [{"role": "user", "content": "hi"}]
BARE = Step(text="Fine.", omit_token_ids=True, logprobs="omit")
"""A reply with neither ids nor logprobs, which might name them."""


async def ask(world: World, **options: object) -> openai.types.chat.ChatCompletion:
    return await world.client().chat.completions.create(model="m", messages=MESSAGES, **options)


async def said(world: World, *, stream: bool, **options: object) -> str:
    """The text that a client sees."""
    if not stream:
        return (await ask(world, **options)).choices[0].message.content or ""
    pieces = await ask(world, stream=True, **options)
    return "".join([choice.delta.content or "" async for piece in pieces for choice in piece.choices])


@pytest.mark.parametrize(
    ("status", "seen"), [(400, 400), (429, 503), (503, 503), (500, 502)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])
async def test_an_engine_error_keeps_its_kind(make_world, mode, status, seen) -> None:
    """C8: what is final stays final, what may pass can be tried again."""
    world: World = await make_world([Step(status=status, error="the engine says no")], mode=mode)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world)
    assert caught.value.status_code == seen
    assert "the engine says no" in str(caught.value)
    [completion] = await world.recorded(1)
    assert completion.outcome == "engine_error"
    assert "the engine says no" in (completion.detail or "")


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang", "chat"])
async def test_a_stream_that_the_engine_cuts_ends_hard_and_never_like_an_answer(make_world, mode) -> None:
    world: World = await make_world([Step(text="one two three four five", cut_after=2)], mode=mode)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    headers = {"authorization": f"Bearer {world.session.key}"}
    received = b""
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(f"{world.node.server.url}/v1/chat/completions", json=body) as response:
            named = response.headers["x-request-id"]
            with pytest.raises(aiohttp.ClientPayloadError):
                async for piece in response.content.iter_any():
                    received += piece
    assert b"[DONE]" not in received
    assert b'"error"' in received
    assert b"Server error: " in received  # with the request's name, what makes some harnesses ask again
    [completion] = await world.recorded(1)
    assert completion.completion_id == named
    assert completion.outcome == "engine_error"
    assert len(completion.response_ids) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["vllm", "sglang", "chat"])
async def test_a_reply_without_token_ids_fails_at_once_and_names_field_and_url(make_world, mode, stream) -> None:
    """A2, A4: never trained silently, never an empty group: the first reply says what is missing."""
    world: World = await make_world(lambda _: BARE, mode=mode)
    with pytest.raises(openai.APIError) as caught:
        await said(world, stream=stream)
    field = "output_ids" if mode == "sglang" else "token_ids"
    assert field in str(caught.value)
    assert world.node.engine.info.url in str(caught.value)
    [completion] = await world.recorded(1)
    assert completion.outcome == "no_token_ids"
    assert field in (world.session.broken or "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("field", ["meta_info", "output_ids"])
async def test_a_router_that_strips_ids_is_found_at_the_first_reply(make_world, field, stream) -> None:
    """A4. SGLang's ids stand twice in a reply: one that lacks ``output_ids`` alone has them all the same."""
    world: World = await make_world([Step(text="Fine.")], mode="sglang")
    world.engine.stripped = [field]
    if field == "output_ids":
        assert await said(world, stream=stream) == "Fine."
        assert [completion.outcome for completion in await world.recorded(1)] == ["ok"]
        return
    with pytest.raises(openai.APIError, match="not of a router that strips it"):
        await said(world, stream=stream)
    assert [completion.outcome for completion in await world.recorded(1)] == ["no_token_ids"]
    assert f"{world.node.engine.info.url}/generate returned no `meta_info`" in (world.session.broken or "")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["vllm", "chat"])
async def test_ids_are_understood_when_logprobs_carry_them(make_world, mode, stream) -> None:
    """A3."""
    world: World = await make_world([Step(text="Fine.", omit_token_ids=True, ids_in_logprobs=True)], mode=mode)
    assert await said(world, stream=stream) == "Fine."
    [completion] = await world.recorded(1)
    assert completion.outcome == "ok"
    assert completion.response_ids.tolist() == world.model.log.generations[0].sampled_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", ["vllm", "sglang", "chat"])
@pytest.mark.parametrize("fault", ["omit", "null", "nan", "inf", "sentinel", "bool"])
async def test_a_logprob_that_is_none_serves_the_harness_and_is_not_trained(make_world, fault, mode, stream) -> None:
    """A8."""
    world: World = await make_world([Step(text="Fine.", logprobs=fault)], mode=mode)
    assert await said(world, stream=stream) == "Fine."
    [completion] = await world.recorded(1)
    assert completion.outcome == "logprob_missing"


async def test_ids_that_a_streaming_parser_lost_are_noticed(make_world) -> None:
    """A1: fewer ids than usage counts."""
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    world: World = await make_world([Step(text=call, drop_empty_deltas=True)], mode="chat")
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]
    stream = await ask(world, tools=tools, stream=True)
    names = [c.function.name async for chunk in stream for ch in chunk.choices for c in ch.delta.tool_calls or ()]
    assert "bash" in names
    [completion] = await world.recorded(1)
    assert completion.outcome == "token_mismatch"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extra", [3, -1])
@pytest.mark.parametrize("mode", ["vllm", "sglang", "chat"])
async def test_usage_that_contradicts_the_ids_is_noticed(make_world, mode, extra, stream) -> None:
    """A1, for whatever reason ids were lost."""
    world: World = await make_world([Step(text="Fine.", usage_extra=extra)], mode=mode)
    assert await said(world, stream=stream) == "Fine."
    [completion] = await world.recorded(1)
    assert completion.outcome == "token_mismatch"
    assert "counts" in (completion.detail or "")
    assert world.session.broken is None


async def test_ids_that_are_lost_before_a_stop_string_are_noticed(make_world) -> None:
    """A1, where the reply is cut by us, before the engine's last word."""
    world: World = await make_world([Step(text="Fine. Stop here.", usage_extra=3)], mode="sglang")
    assert await said(world, stream=True, stop=["Stop"]) == "Fine. "
    [completion] = await world.recorded(1)
    assert completion.outcome == "token_mismatch"


@pytest.mark.parametrize("mode", ["tito", "vllm", "sglang"])
async def test_a_reply_that_ends_for_its_length_before_it_has_it_is_noticed(make_world, mode) -> None:
    world: World = await make_world([Step(text="one two three", finish_reason="length")], mode=mode)
    assert (await ask(world, max_tokens=50)).choices[0].finish_reason == "length"
    [completion] = await world.recorded(1)
    assert completion.outcome == "token_mismatch"
    assert "a limit of 50" in (completion.detail or "")


@pytest.mark.parametrize("mode", ["vllm", "sglang", "chat"])
async def test_without_the_requirement_a_session_goes_on_without_ids(make_world, mode) -> None:
    """For data that needs no ids. What is missing is said with every call all the same."""
    world: World = await make_world(lambda _: BARE, mode=mode, require_token_ids=False)
    for _ in range(2):
        if mode == "chat":
            assert (await ask(world)).choices[0].message.content == "Fine."
        else:  # here the text comes from the ids: there is nothing to answer
            with pytest.raises(openai.APIStatusError, match=r"token_ids|output_ids"):
                await ask(world)
    assert {completion.outcome for completion in await world.recorded(2)} == {"no_token_ids"}
    assert not world.session.closed


async def test_drifting_tokenization_splits_in_chat_mode_and_merges_in_tito_mode(make_world) -> None:
    """What the engine sampled decodes to the text but is not how the text is tokenized."""
    for mode, split in (("chat", "retokenized"), ("tito", None)):
        world: World = await make_world([Step(text="x")], mode=mode)
        letters = tuple(world.model.tokenizer.convert_tokens_to_ids(list("Paris")))
        world.model.script.steps = [Step(text="Paris", ids=letters), Step(text="Done.")]
        first = await ask(world)
        assert first.choices[0].message.content == "Paris"
        messages = [*MESSAGES, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "and?"}]
        await world.client().chat.completions.create(model="m", messages=messages)
        one, two = await world.completions()
        assert two.parent_id == one.completion_id
        assert two.split == split
        assert world.prompt(two) == world.model.log.generations[1].context_ids
        await world.node.close()
        (world.folder / "polar.db").unlink()
