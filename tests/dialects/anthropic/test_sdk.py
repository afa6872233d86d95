"""The dialect through the vendor's own SDK: what a harness sees, and what is recorded meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import anthropic
import pytest

from polar.contract.chat import Message, ToolCall
from tests.dialects.anthropic.conftest import BASH, OMITTED, THINKING, client, user
from tests.gateway.conftest import World
from tests.support.script import Step

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -la"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "bash", "arguments": {"command": "a "b" c"}}\n</tool_call>'
THOUGHT = "<think>\nI should look.\n</think>\n\n"


async def ask(world: World, *messages: dict[str, Any], **options: Any) -> anthropic.types.Message:
    given = list(messages) or [user("hi")]
    return await client(world).messages.create(**{"model": "m", "max_tokens": 512, "messages": given, **options})


async def ask_stream(world: World, *messages: dict[str, Any], **options: Any) -> anthropic.types.Message:
    """The same by the SDK's streaming helper, which puts the message together itself."""
    given = list(messages) or [user("hi")]
    options = {"model": "m", "max_tokens": 512, "messages": given, **options}
    async with client(world).messages.stream(**options) as stream:
        return await stream.get_final_message()


ASK = pytest.mark.parametrize("asking", [ask, ask_stream], ids=["whole", "stream"])


@ASK
@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_reply_reaches_the_client_and_its_tokens_the_store(make_world, mode, asking) -> None:
    world: World = await make_world([Step(text="The capital of France is Paris.")], mode=mode)
    reply = await asking(world, user("capital of France?"), model="any-name")

    [text] = reply.content
    assert text.text == "The capital of France is Paris."
    assert (reply.stop_reason, reply.stop_sequence, reply.model) == ("end_turn", None, "any-name")
    [completion] = await world.completions()
    [generation] = world.model.log.generations
    assert world.prompt(completion) == generation.context_ids
    assert completion.response_ids.tolist() == generation.sampled_ids
    assert (completion.outcome, completion.dialect) == ("ok", "anthropic")
    assert reply.usage.input_tokens == len(generation.context_ids)
    assert reply.usage.output_tokens == len(generation.sampled_ids)


@ASK
@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_thinking_text_and_two_calls(make_world, mode, asking) -> None:
    world: World = await make_world([Step(text=f"{THOUGHT}I will look.\n{CALL}\n{CALL}")], mode=mode)
    reply = await asking(world, tools=[BASH], thinking=THINKING, max_tokens=2048)

    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, one, two = reply.content
    assert thinking.thinking == "I should look."
    assert thinking.signature
    assert text.text == "I will look."
    assert (one.name, one.input) == (two.name, two.input) == ("bash", {"command": "ls -la"})
    assert one.id != two.id
    assert reply.stop_reason == "tool_use"


@ASK
async def test_thinking_that_was_not_asked_for_is_recorded_and_not_sent(make_world, asking) -> None:
    world: World = await make_world([Step(text=f"{THOUGHT}Fine.")])
    reply = await asking(world)
    assert [(block.type, block.text) for block in reply.content] == [("text", "Fine.")]
    [completion] = await world.completions()
    assert completion.reply.reasoning == "I should look."
    assert reply.usage.output_tokens == len(completion.response_ids)


@ASK
async def test_a_call_whose_arguments_are_no_json_is_an_object_for_the_client(make_world, asking) -> None:
    """D12: the SDK's stream reader fails on broken JSON."""
    world: World = await make_world([Step(text=BROKEN), Step(text="Done.")])
    first = await asking(world, tools=[BASH])
    [call] = first.content
    assert call.input == {"__unparsedToolInput": {"raw": '{"command": "a "b" c"}'}}

    history = [{"role": "assistant", "content": [call.model_dump(exclude_none=True)]}]
    result = user([{"type": "tool_result", "tool_use_id": call.id, "content": "no JSON", "is_error": True}])
    await asking(world, user("hi"), *history, result, tools=[BASH])
    one, two = await world.completions()
    assert one.reply.tool_calls[0].arguments == '{"command": "a "b" c"}'
    assert (two.parent_id, two.split) == (one.completion_id, None)


@ASK
async def test_stop_sequences_and_limits_are_told(make_world, asking) -> None:
    """D18."""
    world: World = await make_world(lambda _: Step(text="Paris is the capital of France."))
    stopped = await asking(world, stop_sequences=["nowhere", "capital"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "capital")
    assert stopped.content[0].text == "Paris is the "
    cut = await asking(world, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)


async def test_the_client_that_is_not_asynchronous_sees_the_same(make_world) -> None:
    world: World = await make_world(lambda _: Step(text=f"I will look.\n{CALL}"))

    def talk() -> list[anthropic.types.Message]:
        with anthropic.Anthropic(base_url=world.node.server.url, api_key=world.session.key, max_retries=0) as sync:
            options: Any = {"model": "m", "max_tokens": 512, "messages": [user("list")], "tools": [BASH]}
            with sync.messages.stream(**options) as stream:
                return [sync.messages.create(**options), stream.get_final_message()]

    for reply in await asyncio.to_thread(talk):
        text, call = reply.content
        assert (text.text, call.input, reply.stop_reason) == ("I will look.", {"command": "ls -la"}, "tool_use")


@pytest.mark.parametrize("thinking", [None, THINKING, OMITTED], ids=["hidden", "shown", "omitted"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_sdks_tool_runner_is_one_chain_of_exact_prefixes(make_world, stream, thinking) -> None:
    """It asks for a conversation that the server holds, and would then send no more than the results."""
    world: World = await make_world([Step(text=f"{THOUGHT}{CALL}"), Step(text=CALL), Step(text=f"{THOUGHT}Done.")])

    @anthropic.beta_async_tool
    async def bash(command: str) -> str:
        """Run a command.

        Args:
            command: what to run
        """
        return f"ran {command}"

    options: Any = {} if thinking is None else {"thinking": thinking}
    runner = client(world).beta.messages.tool_runner(
        model="m", max_tokens=2048, messages=[user("go")], tools=[bash], stream=stream, **options
    )
    last = await runner.until_done()
    assert last.content[-1].text == "Done."
    one, two, three = await world.recorded(3)
    assert [completion.parent_id for completion in (two, three)] == [one.completion_id, two.completion_id]
    assert [(m.role, m.content) for m in three.messages] == [("tool", "ran ls -la")]


async def test_a_conversation_that_the_server_holds_is_refused_and_not_begun_anew(make_world) -> None:
    world: World = await make_world([])
    held = client(world).beta.messages
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_x"}):
        with pytest.raises(anthropic.BadRequestError, match="no conversation is held here"):
            await held.create(model="m", max_tokens=9, messages=[user("hi")], thread=thread)


async def test_the_beta_client_and_a_bearer_token_work_too(make_world) -> None:
    """As Claude Code calls: ``?beta=true``, and ``ANTHROPIC_AUTH_TOKEN`` instead of a key."""
    world: World = await make_world([Step(text="Fine.")])
    beta = client(world, api_key=None, auth_token=world.session.key).beta
    reply = await beta.messages.create(
        model="m", max_tokens=64, messages=[user("hi")], betas=["some-beta-2027-01-01"]
    )
    assert reply.content[0].text == "Fine."


async def test_a_count_is_the_prompt_that_a_call_would_have_and_records_nothing(make_world) -> None:
    """D16."""
    world: World = await make_world([Step(text="Fine.")])
    asked: Any = {"model": "m", "messages": [user("hi")], "system": "You are an agent.", "tools": [BASH]}
    count = await client(world).messages.count_tokens(**asked)
    beta = await client(world).beta.messages.count_tokens(**asked)
    assert await world.completions() == []
    reply = await client(world).messages.create(max_tokens=64, **asked)
    assert count.input_tokens == beta.input_tokens == reply.usage.input_tokens > 0


async def test_an_image_in_a_tool_result_reaches_the_engine(make_world) -> None:
    """D15."""
    world: World = await make_world(lambda _: Step(text="A cat."), mode="chat")
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": "shot"}, {"type": "image", "source": source}]
    await ask(
        world,
        user("look"),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "bash", "input": {}}]},
        user([{"type": "tool_result", "tool_use_id": "t1", "content": content}]),
        tools=[BASH],
    )
    sent = world.model.log.generations[0].request["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "user"]
    assert "data:image/png;base64,AAAA" in str(sent[3]["content"])
    [completion] = await world.completions()
    assert completion.messages[1] == Message("assistant", tool_calls=(ToolCall("t1", "bash", "{}"),))


# ---- errors ----------------------------------------------------------------------------------------------


@ASK
async def test_a_prompt_over_the_context_is_told_in_the_words_that_make_harnesses_compact(make_world, asking) -> None:
    """D17."""
    world: World = await make_world([Step(text="Fine.")], max_model_len=32)
    with pytest.raises(anthropic.BadRequestError) as caught:
        await asking(world, user("word " * 100))
    error = caught.value.body["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("prompt is too long: ")
    assert error["message"].endswith(" tokens > 32 maximum")


async def test_max_tokens_beyond_the_context_is_clamped(make_world) -> None:
    """D17."""
    world: World = await make_world([Step(text="Fine.")], max_model_len=64)
    assert (await ask_stream(world, max_tokens=64000)).content[0].text == "Fine."


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, anthropic.BadRequestError, "invalid_request_error"),
        (503, anthropic.InternalServerError, "overloaded_error"),
        (500, anthropic.InternalServerError, "api_error"),
    ],
)
async def test_an_engine_error_keeps_its_kind(make_world, status, error, kind) -> None:
    """C8."""
    world: World = await make_world([Step(status=status, error="the engine says no")])
    with pytest.raises(error, match="the engine says no") as caught:
        await ask(world)
    assert caught.value.body["error"]["type"] == kind


async def test_a_wrong_key_is_refused_once(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await client(world, api_key="sk-wrong").messages.create(model="m", max_tokens=9, messages=[user("hi")])
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert await world.completions() == []


async def test_a_closed_session_takes_no_more_calls(make_world) -> None:
    world: World = await make_world([Step(text="Fine.")])
    await world.node.gateway.close(world.session)
    with pytest.raises(anthropic.APIStatusError) as caught:
        await ask(world)
    assert caught.value.status_code == 410


async def test_a_stream_that_the_engine_cuts_ends_in_an_error_event_and_never_like_an_answer(make_world) -> None:
    world: World = await make_world([Step(text="one two three four five", cut_after=2)])
    body = {"model": "m", "max_tokens": 64, "messages": [user("hi")], "stream": True}
    received = b""
    async with aiohttp.ClientSession(headers={"x-api-key": world.session.key}) as http:
        async with http.post(f"{world.node.server.url}/v1/messages", json=body) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                async for piece in response.content.iter_any():
                    received += piece
    assert b"event: error" in received
    assert b"message_stop" not in received
    with pytest.raises(anthropic.APIStatusError):
        await ask_stream(world)
