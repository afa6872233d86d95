"""The recorded sessions of the real harnesses: each call continues the reply before it, whatever the harness made of
it on its way back."""

from __future__ import annotations

import pytest

from polar.capture.graph import SessionGraph
from polar.contract.chat import Message
from tests.harnesses.record_sessions import read
from tests.harnesses.scripts import SHELL_TOOLS
from tests.trajectories.making import completion


def replies(messages: tuple[Message, ...]) -> list[int]:
    return [place for place, message in enumerate(messages) if message.role == "assistant"]


@pytest.mark.parametrize("harness", SHELL_TOOLS)
def test_each_call_continues_the_reply_before_it(harness: str):
    sent, sampled = read(harness)
    graph = SessionGraph()
    parents: list[str | None] = []
    for seq, place in enumerate(replies(sampled.messages)):
        attachment = graph.attach(sent.messages[:place])
        assert attachment.messages == sampled.messages[:place]
        parents.append(attachment.parent.completion_id if attachment.parent else None)
        made = completion(seq, [1], [2], messages=sampled.messages[:place])
        made.reply = sampled.messages[place]
        graph.add(made)
    assert parents == [None, *(f"c{seq}" for seq in range(20))]


@pytest.mark.parametrize("harness", SHELL_TOOLS)
def test_the_model_thought_in_every_reply_and_was_offered_tools(harness: str):
    _, sampled = read(harness)
    said = [sampled.messages[place] for place in replies(sampled.messages)]
    assert [bool(reply.reasoning) for reply in said] == [True] * 21
    offered = {tool.name for tool in sampled.tools}
    assert {call.name for reply in said for call in reply.tool_calls} == {SHELL_TOOLS[harness][0]} <= offered
