"""What a task gives the agent besides its own tools: an MCP server, in the sandbox or at a URL, whose tool the model
calls and whose answer it is told; and skills, which are in its prompt. A server that does not start is an error:
without it the session would be one of another task.

Qwen Code has its model look a tool of a server up, and call it through another: so its list of tools never changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from tests.harnesses.conftest import Run
from tests.harnesses.running import Says
from tests.harnesses.scripts import SHELL_TOOLS, call, thinking
from tests.support.script import Step

pytestmark = [pytest.mark.real, pytest.mark.slow]

WITH_SERVERS = [name for name in SHELL_TOOLS if name not in ("pi", "mini_swe_agent")]
WITH_SKILLS = [name for name in SHELL_TOOLS if name != "mini_swe_agent"]
BEARS = "There are 7 bears, of {place}."
TOOL = {
    "name": "count_bears",
    "description": "Count the bears.",
    "inputSchema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
INFO = {"capabilities": {"tools": {}}, "serverInfo": {"name": "bears", "version": "1"}}
LOCAL = f"""\
cat > server.py <<'END'
import json, os, sys, time
time.sleep(3)
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    said = {{}}
    if asked["method"] == "initialize":
        said = {{"protocolVersion": asked["params"]["protocolVersion"], **{INFO!r}}}
    elif asked["method"] == "tools/list":
        said = {{"tools": [{TOOL!r}]}}
    elif asked["method"] == "tools/call":
        place = asked["params"]["arguments"]["place"]
        text = f"There are {{os.environ['BEARS']}} bears, {{sys.argv[1]}} {{place}}."
        said = {{"content": [{{"type": "text", "text": text}}]}}
    print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": said}}), flush=True)
END
"""
SERVER = {"name": "bears", "command": "python3", "args": ["/workspace/server.py", "of"], "env": {"BEARS": "7"}}
PLACE = {"place": "Berne"}
NAME = r'"name": ?"([^"]*count_bears)"'
SKILL = """\
mkdir -p skills/greet
printf -- '---\\nname: greet\\ndescription: How bears say good morning.\\n---\\nx\\n' > skills/greet/SKILL.md
"""


def bear_counter(harness: str) -> Says:
    """A model that calls the tool under the name that it is offered by."""

    def says(prompt: str, turn: int) -> Step:
        if turn == 2 or (turn == 1 and harness != "qwen_code"):
            return Step(text=thinking("Enough.", "It is counted."))
        name = re.findall(r'"([a-z_]*count_bears)": ' if harness == "qwen_code" else NAME, prompt)[-1]
        if harness == "qwen_code":
            arguments = {"name": name, "arguments": PLACE}
            looked_up = call("tool_search", {"query": f"select:{name}"})
            return Step(text=thinking("How many?", call("tool_call", arguments) if turn else looked_up))
        return Step(text=thinking("How many?", call(name, PLACE | _more(harness))))

    return says


def _more(harness: str) -> dict[str, Any]:
    return {"security_risk": "LOW", "summary": "count"} if harness == "openhands_sdk" else {}


async def check_tool(session: Run, harness: str, **options: Any) -> None:
    ran = await session(harness, bear_counter(harness), **options)
    assert ran.outcome == ("COMPLETED", None)
    assert ran.traces == [("main", 3 if harness == "qwen_code" else 2, 1.0)]
    assert BEARS.format(**PLACE) in ran.text(ran.model.log.generations[-1].context_ids)
    ran.check()


@pytest.mark.parametrize("harness", WITH_SERVERS)
async def test_the_tool_of_a_server_in_the_sandbox_is_called(session: Run, harness: str):
    await check_tool(session, harness, prepare=[LOCAL], mcp_servers=(SERVER,))


@pytest.fixture
async def server_url() -> AsyncIterator[str]:
    """An MCP server over streamable HTTP, on this host."""

    async def answer(request: web.Request) -> web.Response:
        if request.method != "POST":
            return web.Response(status=405)
        asked = json.loads(await request.read())
        if "id" not in asked:
            return web.Response(status=202)
        said: dict[str, Any] = {}
        if asked["method"] == "initialize":
            said = {"protocolVersion": asked["params"]["protocolVersion"], **INFO}
        elif asked["method"] == "tools/list":
            said = {"tools": [TOOL]}
        elif asked["method"] == "tools/call":
            said = {"content": [{"type": "text", "text": BEARS.format(**asked["params"]["arguments"])}]}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": said})

    app = web.Application()
    app.router.add_route("*", "/mcp", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    await runner.cleanup()


@pytest.mark.parametrize("harness", WITH_SERVERS)
async def test_the_tool_of_a_server_with_a_url_is_called(session: Run, harness: str, server_url: str):
    servers = ({"name": "bears", "url": server_url},)
    await check_tool(session, harness, allow_internet=True, mcp_servers=servers)


@pytest.mark.parametrize("harness", WITH_SERVERS)
async def test_a_server_that_does_not_start_is_an_error(session: Run, harness: str):
    servers = (SERVER, {"name": "gone", "command": "no-such-server"})
    ran = await session(harness, [Step(text="I see.")] * 3, prepare=[LOCAL], mcp_servers=servers)
    assert ran.result.status == "ERROR"
    assert "gone" in str(ran.result.error)
    assert all(reward is None for _, _, reward in ran.traces)


@pytest.mark.parametrize("harness", WITH_SKILLS)
async def test_a_skill_is_in_the_prompt(session: Run, harness: str):
    ran = await session(harness, [Step(text="I see.")] * 3, prepare=[SKILL], skills_path="skills")
    assert ran.outcome == ("COMPLETED", None)
    assert "How bears say good morning." in ran.text(ran.model.log.generations[0].context_ids)
