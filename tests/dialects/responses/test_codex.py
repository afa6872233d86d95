"""A session as Codex speaks it: no instructions, developer items with ids, history sent back item by item."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.dialects.responses.conftest import AGENTS, BASH, PATCH, user
from tests.gateway.conftest import World
from tests.support.script import Step

THOUGHT = "<think>\nLet me think.\n</think>\n\n"
STEPS = [
    Step(
        text=f'{THOUGHT}I will look.\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "ls"}}}}\n</tool_call>'
    ),
    Step(
        text='<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "*** Begin Patch"}}\n</tool_call>'
    ),
    Step(text=f"{THOUGHT}Done."),
]
LEAD = [
    {
        "type": "message",
        "id": "msg_1",
        "role": "developer",
        "content": [{"type": "input_text", "text": "Be helpful."}],
    },
    {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "Be safe."}]},
    user("<environment>here</environment>"),
    user("list the files"),
]


def request(items: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "model": "test-model",
        "input": items,
        "tools": [BASH, AGENTS, PATCH],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "thread",
        **fields,
    }


def as_codex_keeps(item: dict[str, Any]) -> dict[str, Any]:
    """An item as Codex sends it back: reasoning without its open text, no status anywhere."""
    kept = {key: value for key, value in item.items() if key != "status"}
    return kept | {"content": None} if kept["type"] == "reasoning" else kept


async def turn(
    world: World, items: list[dict[str, Any]], headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """One call; what Codex keeps of it are the items that ended, in a stream that was completed."""
    stream = await world.client().responses.create(
        **request(items, extra_body={"client_metadata": {"turn": str(len(items))}}), extra_headers=headers or {}
    )
    found = [event async for event in stream]
    assert found[-1].type == "response.completed"
    done = [event.item.to_dict() for event in found if event.type == "response.output_item.done"]
    return [as_codex_keeps(item) for item in done]


def outputs(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [item for item in items if "call_id" in item]
    return [{"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"} for item in calls]


@pytest.mark.parametrize("mode", ["tito", "chat"])
async def test_a_tool_loop_is_one_chain_of_exact_prefixes(make_world, mode) -> None:
    world: World = await make_world(STEPS, mode=mode)
    items = list(LEAD)
    for _ in range(3):
        reply = await turn(world, items)
        items += reply + outputs(reply)
    one, two, three = await world.completions()
    assert [c.outcome for c in (one, two, three)] == ["ok"] * 3
    assert [c.parent_id for c in (two, three)] == [one.completion_id, two.completion_id]
    if mode == "tito":
        assert [c.split for c in (one, two, three)] == [None] * 3
        assert (two.shared, three.shared) == (one.total_len, two.total_len)
        prompts = [generation.context_ids for generation in world.model.log.generations]
        assert [world.prompt(c) for c in (one, two, three)] == prompts
    assert [item["type"] for item in items if "namespace" in item] == ["function_call"]
    assert [item["input"] for item in items if item["type"] == "custom_tool_call"] == ["*** Begin Patch"]


async def test_thinking_that_came_back_sealed_is_in_the_next_conversation(make_world) -> None:
    world: World = await make_world(STEPS, mode="chat")
    reply = await turn(world, LEAD)
    assert reply[0]["type"] == "reasoning"
    assert reply[0]["content"] is None
    await turn(world, [*LEAD, *reply, *outputs(reply)])
    _, two = await world.completions()
    assert "Let me think." in (world.session.graph.conversation(two)[4].reasoning or "")


async def test_a_stream_that_broke_costs_one_branch_and_not_every_turn_after_it(make_world) -> None:
    """Codex keeps the items that had ended, asks again, and sends them with every call from then on."""
    broken = Step(text=THOUGHT + "I will look. " * 9, cut_after=30)
    steps = iter([broken, STEPS[0], Step(text="Done.")])
    world: World = await make_world(lambda _: next(steps))
    kept: list[dict[str, Any]] = []
    with pytest.raises(openai.APIConnectionError):
        async for event in await world.client().responses.create(**request(LEAD)):
            kept += [event.item.to_dict()] if event.type == "response.output_item.done" else []
    assert [item["type"] for item in kept] == ["reasoning"]
    items = [*LEAD, *map(as_codex_keeps, kept)]
    for _ in range(2):
        reply = await turn(world, items)
        items += reply + outputs(reply)
    _, two, three = await world.completions()
    assert (three.parent_id, three.split, three.shared) == (two.completion_id, None, two.total_len)
    assert [m.reasoning for m in world.session.graph.conversation(three) if m.reasoning] == ["Let me think."] * 2


async def test_side_calls_and_sub_agents_are_known_by_their_headers(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    await turn(world, LEAD)
    await turn(world, [*LEAD, user("summarise")], {"x-codex-turn-metadata": '{"request_kind": "compaction"}'})
    await turn(world, [user("sub")], {"x-openai-subagent": "collab_spawn"})
    assert [c.role_hint for c in await world.completions()] == [None, "auxiliary", "subagent"]
