"""``RolloutClient`` against servers as they are, and as they were."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from polar.client import RolloutClient, ServiceError
from polar.contract.chat import Sampling
from polar.contract.errors import PolarError, UsageError
from polar.contract.task import AgentSpec, CustomShell, RuntimeSpec, TaskRequest
from tests.rollout.conftest import World
from tests.rollout.making import SHELL, TOKENS
from tests.rollout.receiver import Receiver

PLAIN = TaskRequest(task_id="t", instruction="i", agent=AgentSpec(harness="shell"))
FULL = TaskRequest(
    task_id="full",
    instruction="i",
    num_samples=3,
    agent=AgentSpec(
        harness="shell", custom_shell=CustomShell(command="true"), settings={"allow_no_model_call": [1, {"b": None}]}
    ),
    runtime=RuntimeSpec(prepare=("x", "y"), env={"A": ""}),
    sampling=Sampling(temperature=0.0, stop=("s",)),
    metadata={"n": None},
)


async def _sent(task: TaskRequest) -> bytes:
    """What is posted for a task."""
    async with Receiver(lambda _: 422) as server, RolloutClient(server.url, "token") as client:
        with pytest.raises(ServiceError):
            await client.submit(task)
        ((_, _, body),) = server.got
    return body


async def test_fields_that_have_their_default_are_not_sent_so_that_older_servers_take_the_rest() -> None:
    assert json.loads(await _sent(PLAIN)) == {"task_id": "t", "instruction": "i", "agent": {"harness": "shell"}}
    body = await _sent(FULL)
    assert set(json.loads(body)) == {
        "task_id", "instruction", "num_samples", "agent", "runtime", "sampling", "metadata"
    }  # fmt: skip
    assert json.loads(body)["runtime"] == {"prepare": ["x", "y"], "env": {"A": ""}}
    assert msgspec.json.decode(body, type=TaskRequest) == FULL


async def test_a_task_arrives_as_it_is_and_is_the_same_one_as_with_all_its_fields(world: World) -> None:
    async with RolloutClient(world.url, TOKENS["admin"]) as client:
        assert await client.submit(FULL) == "full"
    assert await world.ledger.task("full") == FULL
    whole = await world.admin.post("/rollout/task/submit", content=msgspec.json.encode(FULL))
    assert whole.status_code == 200


async def test_a_server_that_is_there_and_can_not_says_why_itself(world: World) -> None:
    await world.ledger.close()
    async with RolloutClient(world.url, TOKENS["admin"], patience=0.0) as client:
        with pytest.raises(ServiceError, match=r"the store .* is not open"):
            await client.nodes()


async def test_what_is_no_rollout_server_is_told_from_one_that_refuses() -> None:
    async with Receiver(lambda _: 404) as other, RolloutClient(other.url, "token") as client:
        with pytest.raises(ServiceError, match=f"{other.url} is no rollout server \\(it answered 404"):
            await client.nodes()
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:8080 is no address of a server: write http://HOST:PORT"):
        RolloutClient("127.0.0.1:8080")


async def test_traces_go_where_they_are_told_to_or_it_is_said_why_not(world: World, tmp_path: Path) -> None:
    await world.join()
    await world.run({"task_id": "t1", "instruction": "i", "agent": SHELL})
    async with RolloutClient(world.url, TOKENS["read"]) as client:
        made = tmp_path / "new" / "folders" / "traces.jsonl"
        assert await client.traces("t1", "jsonl", made) == made.stat().st_size > 0
        for bad in (made.parent, made / "below.jsonl"):
            with pytest.raises(PolarError, match=f"{bad} can't be written"):
                await client.traces("t1", "jsonl", bad)
    assert list(made.parent.iterdir()) == [made]
