"""A tool loop as Claude Code sends it, with everything it does to a history: one chain of exact prefixes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import anthropic
import pytest

from tests.dialects.anthropic.conftest import BASH, OMITTED, client, user
from tests.gateway.conftest import World
from tests.support.script import Step

ADAPTIVE: Any = {"type": "adaptive", "display": "updates"}
STEPS = [
    Step(
        text="<think>\nI should look.\n</think>\n\nI will look.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls -la", "timeout": 9000.0}}\n</tool_call>'
    ),
    Step(
        text="<think>\nAgain.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat \\u0062", "timeout": 1}}\n</tool_call>'
    ),
    Step(text="All done."),
]


class ClaudeCode:
    """The client's side: a history in its own form, sent in the form of the moment.

    Inputs go back as objects in the schema's key order, with whole numbers for floats. Of each request only the
    last message carries ``cache_control``, for which a string becomes a block. The billing line is never the
    same twice.
    """

    def __init__(self, world: World, *, stream: bool, thinking: Any = ADAPTIVE) -> None:
        self._client = client(world)
        self._thinking = thinking
        self._stream = stream
        self._turn = itertools.count()
        self.history: list[dict[str, Any]] = []

    async def ask(self, *messages: dict[str, Any]) -> anthropic.types.Message:
        self.history += messages
        billing = f"x-anthropic-billing-header: cc_version=2.1.332.{next(self._turn)}; cc_entrypoint=sdk-cli;"
        request: Any = {
            "model": "m",
            "max_tokens": 32000,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": self._marked(),
            "tools": [BASH],
            "thinking": self._thinking,
        }
        if self._stream:
            async with self._client.messages.stream(**request) as stream:
                reply = await stream.get_final_message()
        else:
            reply = await self._client.messages.create(**request, timeout=60)
        self.history.append({"role": "assistant", "content": [_again(block) for block in reply.content]})
        return reply

    def _marked(self) -> list[dict[str, Any]]:
        messages = copy.deepcopy(self.history)
        last = messages[-1]
        if isinstance(last["content"], str):
            last["content"] = [{"type": "text", "text": last["content"]}]
        last["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return messages


def _again(block: Any) -> dict[str, Any]:
    body = block.model_dump(exclude_none=True)
    if body["type"] == "tool_use":
        order = list(BASH["input_schema"]["properties"])
        body["input"] = {
            key: int(value) if isinstance(value, float) else value
            for key, value in sorted(body["input"].items(), key=lambda item: order.index(item[0]))
        }
    return body


def result(call: Any, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call.id, "content": content}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_tool_loop_is_one_chain_of_exact_prefixes(make_world, stream) -> None:
    world: World = await make_world(STEPS)
    claude = ClaudeCode(world, stream=stream)
    first = await claude.ask(user("list the files"))
    [call] = [block for block in first.content if block.type == "tool_use"]
    assert list(call.input) == ["command", "timeout"]

    second = await claude.ask(user([result(call, "a b")]))
    one, two = [block for block in second.content if block.type == "tool_use"]
    assert two.input == {"command": "cat b", "timeout": 1}

    # In the order in which they finished, the second as a list; and an empty text is in the history by now.
    claude.history[-1]["content"].insert(1, {"type": "text", "text": ""})
    third = await claude.ask(user([result(two, [{"type": "text", "text": "B"}]), result(one, "A")]))
    assert third.content[0].text == "All done."

    completions = await world.completions()
    assert [completion.split for completion in completions] == [None, None, None]
    for before, after in itertools.pairwise(completions):
        assert after.parent_id == before.completion_id
        assert after.shared == before.total_len
    for completion, generation in zip(completions, world.model.log.generations, strict=True):
        assert world.prompt(completion) == generation.context_ids
        assert completion.response_ids.tolist() == generation.sampled_ids
    assert "billing" not in str([completion.messages for completion in completions])


async def test_thinking_that_is_sent_without_its_text_outlives_a_history_that_was_edited(make_world) -> None:
    """As with ``claude -p``, which asks for empty thinking blocks and returns their signatures. A reminder in the
    first message begins a new trace, whose prompt is all the client's."""
    world: World = await make_world(STEPS)
    claude = ClaudeCode(world, stream=True, thinking=OMITTED)
    first = await claude.ask(user("list the files"))
    thinking, _, call = first.content
    assert thinking.thinking == ""
    claude.history[0] = user("list the files\n<system-reminder>be brief</system-reminder>")
    await claude.ask(user([result(call, "a b")]))
    one, two = await world.completions()
    assert two.parent_id is None
    [sent] = [message for message in two.messages if message.role == "assistant"]
    assert sent.reasoning == one.reply.reasoning == "I should look."


async def test_reminders_in_the_middle_of_a_conversation_keep_the_chain(make_world) -> None:
    world: World = await make_world([Step(text="One."), Step(text="Two.")])
    claude = ClaudeCode(world, stream=True)
    await claude.ask(user("go"), {"role": "system", "content": "The date is today."})
    await claude.ask(user("go on"), {"role": "system", "content": "The date is tomorrow."})
    one, two = await world.completions()
    assert (two.parent_id, two.split, two.shared) == (one.completion_id, None, one.total_len)
    assert [message.role for message in two.messages] == ["user", "system"]


async def test_a_sub_agent_is_known_by_its_header(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    for headers in ({}, {"x-claude-code-agent-id": "agent-1"}):
        await client(world, default_headers=headers).messages.create(
            model="m", max_tokens=64, messages=[user(f"go {len(headers)}")]
        )
    assert [completion.role_hint for completion in await world.completions()] == [None, "subagent"]
