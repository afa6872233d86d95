"""A tool loop as Gemini CLI sends it, with everything it does to a history: one chain of exact prefixes."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.dialects.gemini.conftest import BASH, events, model, parts_of, user
from tests.gateway.conftest import World
from tests.support.script import Step

STEPS = [
    Step(
        text="<think>\nI should look.\n</think>\n\nI will look.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls -la", "timeout": 2.0}}\n</tool_call>'
    ),
    Step(
        text="<think>\nAgain.\n</think>\n\n"
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "bash", "arguments": {"command": "cat }\n</tool_call>'
    ),
    Step(text="All done."),
]


class GeminiCLI:
    """The client's side: a history in its own form.

    Thoughts are dropped, signatures are kept; texts in a row become one; a call's id is made longer, and its args
    are parsed and written again, so that 2.0 becomes 2. With ``forget_signatures`` it is an older one that keeps
    none and has no ids at all.
    """

    def __init__(self, world: World, *, forget_signatures: bool = False) -> None:
        self._world = world
        self._forget = forget_signatures
        self.history: list[dict[str, Any]] = []

    async def ask(self, *parts: Any) -> list[dict[str, Any]]:
        """The calls of the reply to these parts."""
        self.history.append(user(*parts))
        body = {
            "contents": self.history,
            "systemInstruction": {"role": "user", "parts": [{"text": "You are an agent."}]},
            "tools": [{"functionDeclarations": [BASH]}],
            "generationConfig": {
                "temperature": 1,
                "topP": 0.95,
                "topK": 64,
                "thinkingConfig": {"includeThoughts": True},
            },
        }
        url = f"{self._world.node.server.url}/v1beta/models/m:streamGenerateContent?alt=sse"
        async with aiohttp.ClientSession(headers={"x-goog-api-key": self._world.session.key}) as http:
            async with http.post(url, json=body) as response:
                assert response.status == 200
                reply = self._kept(parts_of(*events(await response.read())))
        self.history.append(model(*reply))
        return [part["functionCall"] for part in reply if "functionCall" in part]

    def _kept(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for part in parts:
            if part.get("thought"):
                continue
            if kept and kept[-1].get("text") and "text" in part:
                kept[-1]["text"] += part["text"]
                continue
            if "functionCall" in part:
                part["functionCall"] = self._call(part["functionCall"])
            if self._forget:
                part.pop("thoughtSignature", None)
            kept.append(part)
        return kept

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        args = json.loads(json.dumps(call["args"]).replace("2.0", "2"))
        return {"name": call["name"], "args": args} | ({} if self._forget else {"id": f"bash__{call['id']}"})


def response(call: dict[str, Any], output: str) -> dict[str, Any]:
    ids = {"id": call["id"]} if "id" in call else {}
    return {"functionResponse": {"name": call["name"], "response": {"output": output}, **ids}}


@pytest.mark.parametrize("forget", [False, True], ids=["signatures kept", "signatures and ids forgotten"])
async def test_a_tool_loop_is_one_chain_of_exact_prefixes(make_world, forget) -> None:
    world: World = await make_world(STEPS)
    cli = GeminiCLI(world, forget_signatures=forget)
    [look] = await cli.ask("This is the environment.", "list the files")
    assert look["args"] == {"command": "ls -la", "timeout": 2}
    good, broken = await cli.ask(response(look, "a\nb"))
    assert good["args"] == {"command": "cat a"}
    assert list(broken["args"]) == ["__unparsedToolInput"]
    assert await cli.ask(response(good, "A"), response(broken, "bad arguments")) == []

    one, two, three = await world.recorded(3)
    assert [completion.split for completion in (one, two, three)] == [None, None, None]
    assert (two.parent_id, three.parent_id) == (one.completion_id, two.completion_id)
    assert (two.shared, three.shared) == (one.total_len, two.total_len)
    for completion, generation in zip((one, two, three), world.model.log.generations, strict=True):
        assert world.prompt(completion) == generation.context_ids
    assert [message.content for message in three.messages] == ["A", "bad arguments"]
    if not forget:
        assert [message.tool_call_id for message in three.messages] == [call.id for call in two.reply.tool_calls]


async def test_replies_that_differ_in_their_thinking_only_are_told_apart(make_world) -> None:
    """The client has dropped the thinking, but the signature knows it."""
    same = [Step(text=f"<think>\n{thought}\n</think>\n\nSame words.") for thought in ("One way.", "Another way.")]
    world: World = await make_world([Step(attempts=tuple(same)), Step(text="Fine."), Step(text="Fine.")])
    branches = [GeminiCLI(world), GeminiCLI(world)]
    for cli in branches:
        await cli.ask("think")
    for cli in branches:
        await cli.ask("go on")
    one, two, after_one, after_two = await world.recorded(4)
    assert [after_one.parent_id, after_two.parent_id] == [one.completion_id, two.completion_id]
