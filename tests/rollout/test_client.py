"""``RolloutClient`` against servers as they are, and as they were."""

from __future__ import annotations

import json

import msgspec
import pytest

from polar.client import RolloutClient, ServiceError
from polar.contract.chat import Sampling
from polar.contract.task import AgentSpec, CustomShell, RuntimeSpec, TaskRequest
from tests.rollout.conftest import World
from tests.rollout.making import TOKENS
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
