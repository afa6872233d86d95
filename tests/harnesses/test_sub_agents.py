"""A model that sends a sub-agent: the sub-agent's calls are a trace of their own, and the main conversation stays
one.

Codex, Claude Code and Qwen Code send them into the background, and are told of the end by a message from the user (a
thought before it would be dropped by Qwen3's template: the model does not think here); Gemini CLI and opencode wait.
pi, mini-swe-agent and the default preset of OpenHands SDK have no sub-agents.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.harnesses.conftest import Run
from tests.harnesses.running import Says
from tests.harnesses.scripts import call, shell
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

PROMPT = "Find the word for the greeting."
FOUND = "The word is hello."
MADE = "the greeting is made"
SENDING: dict[str, tuple[str, dict[str, Any]]] = {
    "codex": ("multi_agent_v1__spawn_agent", {"message": PROMPT}),
    "claude_code": ("Agent", {"description": "find", "prompt": PROMPT, "subagent_type": "general-purpose"}),
    "gemini_cli": ("invoke_agent", {"agent_name": "generalist", "prompt": PROMPT}),
    "qwen_code": ("agent", {"description": "find", "prompt": PROMPT, "subagent_type": "general-purpose"}),
    "opencode": ("task", {"description": "find", "prompt": PROMPT, "subagent_type": "general"}),
}


def model_of(harness: str) -> Says:
    def says(prompt: str, turn: int) -> Step:
        if "[main]" in prompt:
            return Step(text=_main(harness, prompt, turn))
        return Step(text=_sub_agent(harness) if turn else shell(harness, "echo hello"))

    return says


def _main(harness: str, prompt: str, turn: int) -> str:
    if turn == 0:
        return f"I send somebody.\n{call(*SENDING[harness])}"
    if MADE in prompt:
        return "All done."
    if FOUND in prompt:
        return shell(harness, f"echo hello > greeting.txt; echo '{MADE}'")
    if harness == "codex":
        agent = re.findall(r'"agent_id": ?"([^"]+)"', prompt)[-1]
        return call("multi_agent_v1__wait_agent", {"targets": [agent]})
    return "I wait."


def _sub_agent(harness: str) -> str:
    return call("complete_task", {"result": {"response": FOUND}}) if harness == "gemini_cli" else FOUND


async def check_sub_agent(session: Run, harness: str, **agent: Any) -> None:
    made = "grep -qx hello greeting.txt"
    ran = await session(harness, model_of(harness), instruction="Make greeting.txt. [main]", test=made, **agent)
    assert ran.outcome == ("COMPLETED", None)
    assert ran.fates == {"trained": len(ran.completions)}
    assert ran.traces == [("main", len(ran.completions) - 2, 1.0), ("subagent", 2, 1.0)]
    assert FOUND in ran.text(ran.main().response_ids)
    ran.check()


@pytest.mark.parametrize("harness", SENDING)
async def test_a_sub_agent_has_a_trace_of_its_own(session: Run, harness: str):
    await check_sub_agent(session, harness)


async def test_opencode_tells_of_its_sub_agents_in_another_dialect_too(session: Run):
    await check_sub_agent(session, "opencode", settings={"api": "anthropic"})
