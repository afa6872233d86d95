"""What a log says of a session: that it began, how it ended, and by its ids what was said of it between."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from polar import logs
from polar.contract.task import AgentSpec, CustomShell, EvaluatorSpec, TaskRequest
from polar.gateway.captures import Captures
from polar.gateway.lifecycle import Pools
from polar.gateway.tasks import make_parts, run_tasks
from polar.store.base import StoreFailure
from tests.gateway.conftest import MakeWorld, World
from tests.support.script import Step

AGENT = """
import json, os, urllib.request as r
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
r.urlopen(r.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


@pytest.fixture
def lines() -> Iterator[Any]:
    """Logs as JSON; called, the lines so far."""
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure("INFO", "json", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    made: World = await make_world([Step(text="hi")])  # type: ignore[misc]
    return made


async def test_each_session_says_that_it_begins_and_how_it_ended(world: World, lines: Any) -> None:
    task = TaskRequest(
        task_id="t",
        instruction="i",
        num_samples=2,
        agent=AgentSpec(harness="shell", custom_shell=CustomShell(command=f"{sys.executable} -c '{AGENT}'")),
        evaluator=EvaluatorSpec(strategy="test_on_output", config={"test_command": "true"}),
    )
    async with asyncio.timeout(60):
        await run_tasks(world.node, [(task, await make_parts(task, sandbox="none"))], pools=Pools())
    results = await world.node.store.results("t")
    assert len(results) == 2
    for result in results:
        begin, end = [line for line in lines() if line.get("session_id") == result.session_id]
        assert (begin["task_id"], begin["attempt"], begin["level"]) == ("t", 1, "info")
        assert begin["message"] == f"session {result.session_id} begins"
        said = (end["task_id"], end["status"], end["traces"], end["reward"])
        assert said == ("t", "COMPLETED", 1, 1.0)
        assert end["seconds"] >= result.timing["run"]
        assert end["message"].endswith(" s, 1 traces, reward 1")


async def test_what_goes_wrong_in_a_call_names_its_session_and_itself(world: World, lines: Any) -> None:
    captures = Captures(world.node)
    session = await captures.open(session_id="c", task_id="mine")

    async def fails(*what: object) -> None:
        raise StoreFailure("the database is away")

    world.node.store.put_completion = fails  # type: ignore[method-assign]
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "surprise": 1}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as client:
        async with client.post(f"{world.node.server.url}/v1/chat/completions", json=body) as answer:
            assert answer.status >= 500
    await captures.close("c")
    found = lines()
    assert len(found) > 2
    assert all(line["session_id"] == "c" and line["task_id"] == "mine" for line in found), found
    assert any(line.get("call_id") for line in found)
    assert "the database is away" in json.dumps(found)
    assert found[0]["message"] == "session c begins"
    assert (found[-1]["status"], found[-1]["traces"]) == ("ERROR", 0)
