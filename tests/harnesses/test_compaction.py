"""A conversation that fills the model's context: the harness has it summarized and goes on from the summary, which is
a call on the side; what comes after is a new trace. Qwen Code then puts a list of skills before the summary, so that
its first call after it is one more.

Codex, Qwen Code and opencode know how long the context is and do it in time, Claude Code when the gateway says
that a prompt is too long. Not everybody can, without a person: Gemini CLI compacts only before a new message from the
user (a harness of our own has one for it); mini-swe-agent never does; pi has the summary made, but its print mode has
ended before it would go on. Those sessions are errors that say why, and their calls are all kept.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from polar.contract.task import AgentSpec
from polar.harnesses import Endpoint, Installed, Plan
from polar.harnesses.gemini_cli import GeminiCLI
from tests.harnesses.conftest import Run
from tests.harnesses.running import Ran, Says
from tests.harnesses.scripts import shell
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

SUMMARY = "Bears were counted again and again, and greeting.txt is still to be made."
MADE = "the greeting is made"
ASKED = {
    "codex": "CONTEXT CHECKPOINT COMPACTION",
    "claude_code": "create a detailed summary",
    "qwen_code": "<state_snapshot>",
    "opencode": "context was compacted",
    "pi": "Turn Prefix",
}
"""Words of each harness's request for a summary."""
FORMS = {
    "claude_code": "<analysis>\nWhat happened.\n</analysis>\n\n<summary>\n{}\n</summary>",
    "qwen_code": "<state_snapshot>\n{}\n</state_snapshot>",
}
CONTEXT = {"opencode": 24000, "pi": 16000}


def model_of(harness: str) -> Says:
    """A model that counts bears, at length, until it was asked for a summary and told of it."""

    def says(prompt: str, turn: int) -> Step:
        if SUMMARY in prompt:
            made = shell(harness, f"echo hello > greeting.txt; echo '{MADE}'")
            return Step(text="All done." if MADE in prompt else made)
        if ASKED.get(harness, SUMMARY) in prompt.rsplit("<|im_start|>", 2)[1]:
            return Step(text=FORMS.get(harness, "{}").format(SUMMARY))
        bears = f'seq -f "Bear number %g looks at the quick brown fox." {turn} {turn + 250}'
        return Step(text=f"I count.\n{shell(harness, bears)}", chunk_tokens=8)

    return says


async def fill(session: Run, harness: str, model: Says | None = None, **agent: str) -> Ran:
    ran = await session(
        harness,
        model or model_of(harness),
        instruction="Count bears, then make greeting.txt.",
        test="grep -qx hello greeting.txt",
        context_length=CONTEXT.get(harness, 32768),
        **agent,
    )
    ran.check()
    return ran


@pytest.mark.parametrize("harness", ["codex", "claude_code", "qwen_code", "opencode"])
async def test_a_session_goes_on_from_a_summary(session: Run, harness: str):
    ran = await fill(session, harness)
    assert ran.outcome == ("COMPLETED", None)
    counted = len(ran.completions) - 3
    assert ran.fates == {"trained": counted + 2, "auxiliary": 1}
    after = [1, 1] if harness == "qwen_code" else [2]
    mains = [("main", calls, 1.0) for calls in after]
    assert ran.traces == [("main", counted, 1.0), ("auxiliary", 1, None), *mains]
    last = ran.result.trajectory.traces[-1]
    assert SUMMARY in ran.text(last.prompt_ids)


async def test_pi_ends_while_its_summary_is_made(session: Run):
    ran = await fill(session, "pi")
    assert ran.result.status == "ERROR"
    assert "maximum context length" in str(ran.result.error)
    assert ran.fates["auxiliary"] == 1


class GeminiTwice(GeminiCLI):
    """Gemini CLI that is asked once, and then again in the same conversation."""

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        plan = super().plan(agent, instruction, endpoint, installed)
        once = str(plan.command.argv)
        again = once.replace(" < ", " --resume latest < ")
        return replace(plan, command=replace(plan.command, argv=f"{once} && {again}"))


def gemini_model(prompt: str, turn: int) -> Step:
    """It ends its first turn when it has counted to what is to be summarized, and is asked for that twice."""
    if "<state_snapshot>" in prompt.rsplit("<|im_start|>", 2)[1]:
        return Step(text=FORMS["qwen_code"].format(SUMMARY))
    if turn == 4 and SUMMARY not in prompt:
        return Step(text="So far.")
    return model_of("gemini_cli")(prompt, turn)


async def test_gemini_goes_on_from_a_summary_when_it_is_asked_again(session: Run):
    again = f"{__name__}:GeminiTwice"
    ran = await fill(session, "gemini_cli", gemini_model, import_path=again)
    assert ran.outcome == ("COMPLETED", None)
    assert ran.fates == {"trained": 7, "auxiliary": 2}
    assert ran.traces == [("main", 5, 1.0), ("auxiliary", 1, None), ("auxiliary", 1, None), ("main", 2, 1.0)]
    assert SUMMARY in ran.text(ran.result.trajectory.traces[-1].prompt_ids)


@pytest.mark.parametrize("harness", ["gemini_cli", "mini_swe_agent"])
async def test_a_harness_that_can_not_go_on_says_so(session: Run, harness: str):
    ran = await fill(session, harness)
    assert ran.result.status == "ERROR"
    assert "32768" in str(ran.result.error)
    assert ran.traces == [("main", len(ran.completions), None)]
