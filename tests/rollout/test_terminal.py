"""The service at a terminal that is none: what ``submit``, ``status``, ``nodes`` and ``drain`` say in a pipe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.making import Done, Forked, environment, refused, start, write
from tests.rollout.conftest import World
from tests.rollout.making import TOKENS, task

Polar = Callable[..., "asyncio.Future[Done]"]


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    made = Forked(tmp_path_factory.mktemp("forked"))
    yield made
    made.close()


@pytest.fixture
def polar(forked: Forked, world: World, tmp_path: Path) -> Polar:
    """A command for the server of this test."""
    where = {"POLAR_SERVER": world.url, "POLAR_TOKEN": TOKENS["admin"]}
    return lambda *args: asyncio.ensure_future(asyncio.to_thread(forked, args, tmp_path, **where))


async def test_who_waits_hears_that_no_node_takes_sessions_and_why_one_failed(world: World, tmp_path: Path) -> None:
    env = environment(POLAR_SERVER=world.url, POLAR_TOKEN=TOKENS["admin"])
    process = start(["submit", write(tmp_path, task(num_samples=2)), "--wait"], tmp_path, env=env)
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            said = await asyncio.to_thread(process.stderr.readline)
            assert said == "no node takes sessions: there is none; start one with polar serve\n"
            await world.join("vm-1")
            await world.admin.delete("/nodes/vm-1")
            said = await asyncio.to_thread(process.stderr.readline)
            assert said == "no node takes sessions: vm-1 is draining; restart it to undo that\n"
            await world.join("vm-2")
            first, second = await world.claim("vm-2")
            await world.finish(first, node_id="vm-2")
            assert await asyncio.to_thread(process.stderr.readline) == "t1-0 COMPLETED\n"
            await world.finish(second, node_id="vm-2", status="ERROR", error="git: not found")
            out, err = await asyncio.to_thread(process.communicate)
    finally:
        process.kill()
        process.wait()
    assert (err, process.returncode) == ("t1-1 ERROR: git: not found\n", 1)
    assert "completed, 1 error" in out


async def test_status_does_not_count_on_nodes_that_drain(world: World, polar: Polar) -> None:
    await world.join("vm-1", gateway_url=f"http://{'long.' * 20}example")
    await world.submit(task())
    well = await polar("status")
    assert "1, of which 1 healthy, 0 draining" in well.out
    assert "no node takes sessions" not in well.out + (await polar("status", "t1")).err
    assert f"http://{'long.' * 20}example" in (await polar("nodes")).out, "nothing is cut in a pipe"
    assert refused(await polar("drain", "nope"), 2, "there is no node nope: there are vm-1")
    await polar("drain", "vm-1")
    whole = await polar("status")
    assert "1, of which 0 healthy, 1 draining" in whole.out
    why = "no node takes sessions: vm-1 is draining; restart it to undo that"
    assert why in whole.out
    assert (await polar("status", "t1")).err == f"{why}\n"
    assert 'polar_nodes{condition="healthy"} 0.0' in (await world.admin.get("/metrics")).text


async def test_a_task_that_was_handed_in_before_is_no_fresh_run(world: World, polar: Polar, tmp_path: Path) -> None:
    path = write(tmp_path, task())
    assert (await polar("submit", path)).err == ""
    again = await polar("submit", path)
    assert (again.code, again.err) == (0, "t1 was handed in before: nothing new was begun\n")
    other = write(tmp_path, task(num_samples=2, timeout_seconds=5.0))
    assert refused(await polar("submit", other), 1, "task t1 exists with another body (num_samples, timeout_seconds)")


async def test_a_mistake_that_only_the_service_sees_is_one_of_usage_and_names_the_file(
    polar: Polar, tmp_path: Path
) -> None:
    bad = write(tmp_path, task(evaluator={"strategy": "vibes"}), "bad.yaml")
    assert refused(await polar("submit", bad), 2, f"polar: {bad}: ", "vibes", "test_on_output")


async def test_a_caller_without_a_token_is_told_so(world: World) -> None:
    answer = await world.as_("nobody").get("/nodes")
    assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (401, "no token")
    answer = await world.as_("nobody").get("/nodes", headers={"Authorization": "Bearer another"})
    assert (answer.status_code, answer.json()["detail"].partition(":")[0]) == (401, "unknown credential")
