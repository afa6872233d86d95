"""``/v1/completions``: programs that write their own prompts, as text or as ids, and what their calls become."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from polar.contract.task import BuilderSpec
from polar.trajectories.assemble import assemble
from tests.gateway.conftest import World
from tests.support.script import Step

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nand of Spain?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = {"extra_body": {"return_token_ids": True}}


async def ask(world: World, prompt: Any, **options: Any) -> openai.types.Completion:
    return await world.client().completions.create(**{"model": "m", "prompt": prompt, "max_tokens": 64, **options})


async def traces(world: World, strategy: str = "prefix_merging") -> list[Any]:
    return assemble(await world.completions(), BuilderSpec(strategy=strategy)).traces


async def test_a_text_prompt_is_tokenized_without_a_template_and_its_reply_recorded(make_world) -> None:
    world: World = await make_world([Step(text="Paris.")])
    reply = await ask(world, PROMPT, model="any-name")

    [choice] = reply.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("Paris.", "stop", None)
    assert (reply.model, reply.object) == ("any-name", "text_completion")
    [completion] = await world.completions()
    [generation] = world.model.log.generations
    assert reply.id == f"cmpl-{completion.completion_id}"
    assert generation.context_ids == world.model.tokenizer.encode(PROMPT, add_special_tokens=False)
    assert world.prompt(completion) == generation.context_ids
    assert completion.response_ids.tolist() == generation.sampled_ids
    assert completion.logprobs.tolist() == generation.logprobs
    assert (completion.dialect, completion.outcome, completion.plain) == ("openai_completions", "ok", True)
    assert reply.usage.prompt_tokens == len(generation.context_ids)
    assert reply.usage.completion_tokens == len(generation.sampled_ids)


async def test_ids_are_used_as_they_are_and_come_back_on_request(make_world) -> None:
    world: World = await make_world([Step(text="Paris.")])
    letters = world.model.tokenizer.convert_tokens_to_ids(list("capital"))  # no text is tokenized to these
    reply = await ask(world, letters, **TOKENS)
    [generation] = world.model.log.generations
    assert generation.context_ids == letters
    [choice] = reply.choices
    assert choice.prompt_token_ids == letters
    assert choice.token_ids == generation.sampled_ids


async def test_a_client_of_ids_is_one_trace_however_odd_the_tokens(make_world) -> None:
    """The loop of a client that keeps the ids itself: what was sampled, then its own ids, then what is sampled."""
    world: World = await make_world([Step(text="x")])
    tokenizer = world.model.tokenizer
    odd = tuple(tokenizer.convert_tokens_to_ids(list("Paris")))
    world.model.script.steps = [Step(text="", ids=odd), Step(text="Madrid.")]
    ids = tokenizer.encode(PROMPT, add_special_tokens=False)
    for between in (NEXT, None):
        reply = await ask(world, ids, **TOKENS)
        ids = [*ids, *reply.choices[0].token_ids]
        if between:
            ids += tokenizer.encode(between, add_special_tokens=False)
    one, two = await world.completions()
    assert (one.split, two.parent_id, two.split) == (None, one.completion_id, None)
    assert two.shared == one.total_len
    [trace] = await traces(world)
    assert trace.completion_ids == (one.completion_id, two.completion_id)
    assert [*trace.prompt_ids, *trace.response_ids] == ids
    assert trace.loss_mask.sum() == len(one.response_ids) + len(two.response_ids)
    assert [message.content for message in trace.response_messages] == ["Paris", NEXT, "Madrid."]


async def test_text_goes_on_behind_the_sampled_ids_where_a_control_token_parts_them(make_world) -> None:
    world: World = await make_world([Step(text="x")])
    odd = tuple(world.model.tokenizer.convert_tokens_to_ids(list("Paris")))
    world.model.script.steps = [Step(text="", ids=odd), Step(text="Madrid.")]
    first = await ask(world, PROMPT)
    assert first.choices[0].text == "Paris"
    await ask(world, PROMPT + "Paris<|im_end|>" + NEXT)
    one, two = await world.completions()
    assert (two.parent_id, two.split) == (one.completion_id, None)
    assert (
        world.model.log.generations[1].context_ids[: one.total_len] == world.prompt(one) + one.response_ids.tolist()
    )
    assert world.prompt(two) == world.model.log.generations[1].context_ids
    assert len(await traces(world)) == 1


async def test_text_that_goes_on_in_the_middle_of_a_word_is_a_new_branch_unless_its_tokens_agree(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="x"))
    odd = tuple(world.model.tokenizer.convert_tokens_to_ids(list("Par")))
    world.model.script.choose = lambda _: Step(text="", ids=odd)
    await ask(world, PROMPT, max_tokens=3)
    world.model.script.choose = lambda _: Step(text=" Fine.")
    await ask(world, PROMPT + "Paris is nice")
    one, two = await world.completions()
    assert (two.parent_id, two.split) == (None, "retokenized")
    assert two.base_id == one.completion_id
    whole = world.model.tokenizer.encode(PROMPT + "Paris is nice", add_special_tokens=False)
    assert world.prompt(two) == world.model.log.generations[1].context_ids == whole
    assert len(await traces(world)) == 2

    await ask(world, PROMPT + "Paris is nice Fine.<|im_end|>")
    *_, three = await world.completions()
    assert (three.parent_id, three.split) == (two.completion_id, None)


async def test_a_reply_that_was_cut_goes_on_from_its_last_token(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="one two three four five six"))
    ids = world.model.tokenizer.encode(PROMPT, add_special_tokens=False)
    first = await ask(world, ids, max_tokens=3, **TOKENS)
    assert first.choices[0].finish_reason == "length"
    await ask(world, [*ids, *first.choices[0].token_ids], max_tokens=3)
    one, two = await world.completions()
    assert (two.parent_id, two.split, len(two.prompt_delta)) == (one.completion_id, None, 0)
    [trace] = await traces(world)
    assert trace.loss_mask.tolist() == [1] * 6


async def test_samples_of_one_prompt_are_branches_of_it(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Paris."))
    await asyncio.gather(*(ask(world, PROMPT) for _ in range(3)))
    await ask(world, PROMPT + "Paris.<|im_end|>" + NEXT)
    *_, last = await world.recorded(4)
    assert last.parent_id is not None
    built = await traces(world)
    assert sorted(len(trace.completion_ids) for trace in built) == [1, 1, 2]
    assert {trace.metadata["context_exact"] for trace in built} == {True}


async def test_a_conversation_never_goes_on_from_a_plain_prompt_with_the_same_words(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Hello."))
    await ask(world, "hi")
    messages: Any = [{"role": "user", "content": "hi"}]
    for _ in range(2):
        reply = await world.client().chat.completions.create(model="m", messages=messages)
        messages = [
            *messages,
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": "and?"},
        ]
    plain, one, two = await world.completions()
    assert plain.plain
    assert (one.parent_id, one.base_id) == (None, None)
    assert (two.parent_id, two.split) == (one.completion_id, None)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream_is_the_same_reply_in_pieces(make_world, usage) -> None:
    world: World = await make_world([Step(text="The capital of France is Paris.")])
    options: dict[str, Any] = {"stream": True, "logprobs": 1, **TOKENS}
    if usage:
        options["stream_options"] = {"include_usage": True}
    chunks = [chunk async for chunk in await ask(world, PROMPT, **options)]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert len(choices) > 3
    assert "".join(choice.text for choice in choices) == "The capital of France is Paris."
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {chunk.id for chunk in chunks} == {f"cmpl-{(await world.completions())[0].completion_id}"}
    [generation] = world.model.log.generations
    assert choices[-1].token_ids == generation.sampled_ids
    assert choices[-1].logprobs.token_logprobs == generation.logprobs
    assert (chunks[-1].usage is not None) is usage


async def test_logprobs_are_those_of_the_record_with_the_text_of_each_token(make_world) -> None:
    """A6: the client sees what it asked for; what we ask of the engine is ours."""
    world: World = await make_world(lambda _: Step(text="Paris is nice."))
    reply = await ask(world, PROMPT, logprobs=0)
    seen = reply.choices[0].logprobs
    [completion] = await world.completions()
    assert seen.token_logprobs == completion.logprobs.tolist()
    assert "".join(seen.tokens) == "Paris is nice.<|im_end|>"
    assert seen.text_offset == [len("".join(seen.tokens[:place])) for place in range(len(seen.tokens))]
    assert seen.top_logprobs == [dict([pair]) for pair in zip(seen.tokens, seen.token_logprobs, strict=True)]
    named = await ask(world, PROMPT, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert named.choices[0].logprobs.tokens == [f"token_id:{token}" for token in completion.response_ids]


async def test_stop_strings_and_limits_are_told(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="one\ntwo\nthree"))
    stopped = await ask(world, PROMPT, stop=["\nthree", "two"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("one\n", "stop")
    assert stopped.choices[0].stop_reason == "two"
    cut = await ask(world, PROMPT, max_tokens=2)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 2)


async def test_markup_is_text(make_world) -> None:
    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>'
    world: World = await make_world([Step(text=text)])
    reply = await ask(world, PROMPT)
    assert reply.choices[0].text == text


async def test_a_prompt_over_the_context_or_without_a_token_is_refused(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="x"), max_model_len=64)
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(world, "word " * 100)
    assert caught.value.code == "context_length_exceeded"
    for nothing in ("", []):
        with pytest.raises(openai.BadRequestError, match="empty"):
            await ask(world, nothing)


async def test_in_chat_mode_it_says_what_to_use(make_world) -> None:
    world: World = await make_world([Step(text="x")], mode="chat")
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(world, PROMPT)
    assert "/v1/chat/completions" in str(caught.value)
    assert await world.completions() == []


async def test_a_retry_of_a_plain_call_is_one_generation(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Paris."))
    headers = {"authorization": f"Bearer {world.session.key}", "idempotency-key": "k"}
    body = {"model": "m", "prompt": PROMPT, "stream": True}
    async with aiohttp.ClientSession(headers=headers) as http:
        for streamed in (True, False):
            url = f"{world.node.server.url}/v1/completions"
            async with http.post(url, json={**body, "stream": streamed}) as response:
                data = await response.read()
                assert b"Paris" in data
    assert json.loads(data)["choices"][0]["text"] == "Paris."
    await world.recorded(1)
