"""A model that writes a tool call which is no JSON: the harness goes on, what is trained is the text as it was
sampled, and the conversation with the broken call in it can still be rendered.

The harnesses write the broken call back each in its own way: as it was (Codex), as an object around it (Claude Code,
OpenHands), repaired (Qwen Code, pi), under another name (opencode). mini-swe-agent leaves the whole reply out, so
that its next call is the beginning of another trace.
"""

from __future__ import annotations

import json

import pytest

from tests.harnesses.conftest import Run
from tests.harnesses.scripts import SHELL_TOOLS, in_order, last_words, shell, thinking
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]


def broken(harness: str) -> str:
    """The call for ``echo hello > greeting.txt`` as a model writes it that forgot how the string ends."""
    name, arguments = SHELL_TOOLS[harness]
    parts = {key: value for key, value in arguments.items() if value != ""}
    command = "cmd" if harness == "codex" else "command"
    inside = json.dumps({**parts, command: "echo hello > greeting.txt"})
    return f'<tool_call>\n{{"name": "{name}", "arguments": {inside[:-2]}}}\n</tool_call>'


@pytest.mark.parametrize("harness", [name for name in SHELL_TOOLS if name != "openhands_sdk"])
async def test_a_broken_call_is_trained_as_it_was_sampled(session: Run, harness: str):
    script = [
        Step(text=thinking("Quick.", broken(harness))),
        Step(text=thinking("Once more.", shell(harness, "echo hello > greeting.txt"))),
        Step(text=thinking("There.", last_words(harness, "It is there."))),
    ]
    ran = await session(harness, in_order(script), test="grep -qx hello greeting.txt")
    assert (ran.outcome, ran.fates) == (("COMPLETED", None), {"trained": 3})
    if harness == "mini_swe_agent":
        assert ran.traces == [("main", 1, 1.0), ("main", 2, 1.0)]
    else:
        assert ran.traces == [("main", 3, 1.0)]
        assert f"{broken(harness)}<|im_end|>" in ran.text(ran.model.log.generations[1].context_ids)
    assert ran.text(ran.completions[0].response_ids).endswith(f"{broken(harness)}<|im_end|>")
    ran.check()
