"""Every harness, unmodified, does a task in two turns at a real gateway: the work is done, and its calls are one
trace. At a model that fails, or has nothing to say, it ends as that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar.harnesses import Plan, by_name
from tests.harnesses.conftest import Run
from tests.harnesses.scripts import DIALECTS, SHELL_TOOLS, call, last_words, shell
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

ASK_ONCE = {"mini_swe_agent": {"env": {"MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}}}
"""It asks ten times, and waits up to a minute in between, whatever the error."""
APIS = {
    ("opencode", "openai"): "openai_responses",
    ("opencode", "anthropic"): "anthropic",
    ("opencode", "google"): "gemini",
    ("pi", "openai-responses"): "openai_responses",
    ("pi", "anthropic-messages"): "anthropic",
    ("pi", "google-generative-ai"): "gemini",
}
DONE = "grep -qx hello greeting.txt"


def two_turns(harness: str) -> list[Step]:
    return [
        Step(text=f"<think>\nA file.\n</think>\n\nI make it.\n{shell(harness, 'echo hello > greeting.txt')}"),
        Step(text=f"<think>\nIs it there?\n</think>\n\n{shell(harness, 'cat greeting.txt')}"),
        Step(text=f"<think>\nIt is.\n</think>\n\n{last_words(harness, 'The file is there.')}"),
    ]


async def check_one_trace(session: Run, harness: str, dialect: str, **agent: object) -> None:
    ran = await session(harness, two_turns(harness), test=DONE, **agent)
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None)
    assert [(call.dialect, call.split) for call in ran.completions] == [(dialect, None)] * 3
    assert ran.traces == [("main", 3, 1.0)]
    ran.check()


@pytest.mark.parametrize("harness", SHELL_TOOLS)
async def test_a_task_in_two_turns_is_one_trace(session: Run, harness: str):
    await check_one_trace(session, harness, DIALECTS.get(harness, "openai_chat"))


@pytest.mark.parametrize(("harness", "api"), APIS)
async def test_it_is_one_trace_in_the_other_dialects_too(session: Run, harness: str, api: str):
    await check_one_trace(session, harness, APIS[harness, api], settings={"api": api})


@pytest.mark.parametrize("harness", SHELL_TOOLS)
async def test_a_model_that_refuses_is_a_failed_session_with_its_words(session: Run, harness: str):
    ran = await session(harness, [Step(status=400, error="the model is out")], **ASK_ONCE.get(harness, {}))
    assert ran.result.status == "ERROR"
    assert harness in str(ran.result.error).replace("-", "_")
    assert "the model is out" in str(ran.result.error)


@pytest.mark.parametrize("harness", SHELL_TOOLS)
async def test_a_model_that_does_nothing_useful_is_a_whole_session_without_reward(session: Run, harness: str):
    ran = await session(harness, [Step(text="I do not know.")] * 5, test=DONE)
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None)
    calls = 3 if harness == "mini_swe_agent" else 1  # a reply without a call is none to it, and left out
    assert ran.traces == [("main", 1, 0.0)] * calls


class OfAnotherVersion:
    """A harness of the user's own: a command line of ours, with an option that its program does not know."""

    pinned = None
    install_hint = ""

    def __init__(self) -> None:
        self.theirs = by_name(self.name)
        self.find, self.judge = self.theirs.find, self.theirs.judge

    def plan(self, *args: Any) -> Plan:
        plan = self.theirs.plan(*args)
        line = plan.command.argv
        new: str | list[str] = (
            line.replace(" < ", " --no-such-option < ")
            if isinstance(line, str)
            else [word.replace("--exit-immediately", "--no-such-option") for word in line]
        )
        return replace(plan, command=replace(plan.command, argv=new))


OTHERS = {name: type(name, (OfAnotherVersion,), {"name": name}) for name in SHELL_TOOLS if name != "openhands_sdk"}
globals().update(OTHERS)


@pytest.mark.parametrize("harness", OTHERS)
async def test_a_command_line_that_the_program_does_not_take_is_an_error_with_its_words(session: Run, harness: str):
    ran = await session(harness, [Step(text="I see.")] * 3, import_path=f"{__name__}:{harness}")
    assert ran.result.status == "ERROR"
    assert "no model call" in str(ran.result.error)
    says = "opencode run [message..]" if harness == "opencode" else "such-option"  # it prints its help, and not why
    assert says in str(ran.result.error)


PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LOOK = {
    "codex": ("view_image", {"path": "/workspace/a.png"}),
    "claude_code": ("Read", {"file_path": "/workspace/a.png"}),
    "gemini_cli": ("read_file", {"file_path": "/workspace/a.png"}),
    "qwen_code": ("read_file", {"file_path": "/workspace/a.png"}),
    "opencode": ("read", {"filePath": "/workspace/a.png"}),
    "pi": ("read", {"path": "/workspace/a.png"}),
}


@pytest.mark.parametrize("harness", LOOK)
async def test_a_model_that_opens_a_picture_is_told_and_goes_on(session: Run, harness: str):
    says = [call(*LOOK[harness]), shell(harness, "echo hello > greeting.txt"), "Done."]
    ran = await session(
        harness, [Step(text=text) for text in says], prepare=[f"echo {PICTURE} | base64 -d > a.png"], test=DONE
    )
    assert ran.outcome == ("COMPLETED", None)
    assert ran.traces == [("main", 3, 1.0)]
    ran.check()


async def test_gemini_that_got_only_empty_answers_failed(session: Run):
    ran = await session("gemini_cli", [Step(text="")] * 9)
    assert ran.result.status == "ERROR"
    assert "empty response" in str(ran.result.error)
