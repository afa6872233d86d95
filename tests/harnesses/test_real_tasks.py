"""Every harness, unmodified, does a task in two turns at a real gateway: the work is done, and its calls are one
trace. At a model that fails, or has nothing to say, it ends as that."""

from __future__ import annotations

import pytest

from tests.harnesses.conftest import Run
from tests.harnesses.scripts import DIALECTS, SHELL_TOOLS, shell
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

HARNESSES = tuple(name for name in SHELL_TOOLS if name != "mini_swe_agent")
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
        Step(text="<think>\nIt is.\n</think>\n\nThe file is there."),
    ]


async def check_one_trace(session: Run, harness: str, dialect: str, **agent: object) -> None:
    ran = await session(harness, two_turns(harness), test=DONE, **agent)
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None)
    assert [(call.dialect, call.split) for call in ran.completions] == [(dialect, None)] * 3
    assert ran.result.trajectory is not None
    (trace,) = ran.result.trajectory.traces
    assert (trace.role, trace.reward, len(trace.completion_ids)) == ("main", 1.0, 3)
    sampled = [token for generation in ran.model.log.generations for token in generation.sampled_ids]
    pairs = zip(trace.response_ids, trace.loss_mask, strict=True)
    assert [int(token) for token, trained in pairs if trained] == sampled


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_task_in_two_turns_is_one_trace(session: Run, harness: str):
    await check_one_trace(session, harness, DIALECTS.get(harness, "openai_chat"))


@pytest.mark.parametrize(("harness", "api"), APIS)
async def test_it_is_one_trace_in_the_other_dialects_too(session: Run, harness: str, api: str):
    await check_one_trace(session, harness, APIS[harness, api], settings={"api": api})


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_model_that_refuses_is_a_failed_session_with_its_words(session: Run, harness: str):
    ran = await session(harness, [Step(status=400, error="the model is out")])
    assert ran.result.status == "ERROR"
    assert harness in str(ran.result.error)
    assert "the model is out" in str(ran.result.error)


@pytest.mark.parametrize("harness", HARNESSES)
async def test_a_model_that_does_nothing_useful_is_a_whole_session_without_reward(session: Run, harness: str):
    ran = await session(harness, [Step(text="I do not know.")] * 5, test=DONE)
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None)
    assert ran.result.trajectory is not None
    (trace,) = ran.result.trajectory.traces
    assert trace.reward == 0.0


async def test_gemini_that_got_only_empty_answers_failed(session: Run):
    ran = await session("gemini_cli", [Step(text="")] * 9)
    assert ran.result.status == "ERROR"
    assert "empty response" in str(ran.result.error)


TOOL_SERVER = """\
cat > server.py <<'END'
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    tool = {"name": "count_bears", "description": "Count the bears.", "inputSchema": {"type": "object"}}
    info = {"capabilities": {"tools": {}}, "serverInfo": {"name": "bears", "version": "1"}}
    if asked["method"] == "initialize":
        said = {"protocolVersion": asked["params"]["protocolVersion"], **info}
    else:
        said = {"tools": [tool]} if asked["method"] == "tools/list" else {}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": said}), flush=True)
END
"""
SKILL = """\
mkdir -p skills/greet
printf -- '---\\nname: greet\\ndescription: How bears greet.\\n---\\nx\\n' > skills/greet/SKILL.md
"""
SERVER = {"name": "bears", "command": "python3", "args": ["/workspace/server.py"]}


@pytest.mark.parametrize("harness", [name for name in HARNESSES if name != "pi"])
async def test_the_model_is_told_of_tools_and_skills(session: Run, harness: str):
    ran = await session(
        harness,
        [Step(text="I see.")] * 3,
        prepare=[TOOL_SERVER, SKILL],
        mcp_servers=(SERVER,),
        skills_path="skills",
    )
    assert (ran.result.status, ran.result.error) == ("COMPLETED", None)
    prompt = str(ran.model.tokenizer.decode(ran.model.log.generations[0].context_ids))
    assert "count_bears" in prompt
    assert "greet" in prompt
