"""Gateways on a real Ray cluster of two hosts: whatever happens to actors, nodes and the wire, every session ends
once, and nothing that an agent was told is lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from polar.client import RolloutClient
from tests.cli.making import scripted_process
from tests.faults.fleet import NODE, PATIENCE, Fleet, check_all
from tests.placement.cluster import Cluster, ray_venv
from tests.placement.conftest import STEPS, TURNS
from tests.placement.engines import Engines
from tests.placement.hosts import Host, two_hosts
from tests.support.tinymodel import make_tiny_model

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.slow]


@dataclass
class World:
    """A rollout server on the first host, and a Ray cluster that begins there."""

    here: Host
    there: Host
    cluster: Cluster
    fleet: Fleet
    client: RolloutClient
    args: list[str]
    log: Path

    async def said(self, *words: str) -> None:
        """Until ``polar up`` has said all of this."""
        async with asyncio.timeout(PATIENCE):
            while missing := [word for word in words if word not in self.log.read_text()]:
                await asyncio.sleep(0.1)
                assert missing

    async def healthy(self, count: int) -> dict[str, str]:
        """Until so many nodes are; their ids, by the hosts' addresses."""
        async with asyncio.timeout(PATIENCE):
            while True:
                nodes = [node for node in await self.client.nodes() if node.healthy]
                if len(nodes) == count:
                    return {node.gateway_url.split("/")[2].split(":")[0]: node.node_id for node in nodes}
                await asyncio.sleep(0.1)

    def gateway(self, host: Host) -> list[psutil.Process]:
        """The processes that are the actor on this host."""
        return [each for each in host.processes() if "GatewayActor" in " ".join(each.cmdline())]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    venv = ray_venv()  # while there is a way out
    async with AsyncExitStack() as stack:
        here, there = stack.enter_context(two_hosts())
        model = make_tiny_model(tmp_path / "model")
        engine = stack.enter_context(scripted_process(model, STEPS, tmp_path / "engine"))
        engines = Engines(engine.url, engine.log, engine.process, there)
        engines.start_there(model, tmp_path / "engine")
        fleet = Fleet(tmp_path, engines, gateways=1)
        fleet.server.settings |= {"host": "0.0.0.0", "insecure": True}
        settings = {**fleet.gateways.pop().settings, "insecure": True, "out": str(tmp_path / "nodes")}
        settings["server"] = fleet.server.url.replace("127.0.0.1", here.address)
        del settings["node_id"], settings["role"]
        (tmp_path / "polar.yaml").write_text(yaml.safe_dump(settings))
        stack.enter_context(fleet)
        ray = Path(tempfile.mkdtemp(prefix="polar-ray-", dir="/tmp"))
        stack.callback(shutil.rmtree, ray, ignore_errors=True)
        cluster = Cluster(here, ray, venv)
        client = await stack.enter_async_context(fleet.client())
        stack.callback(there.kill)
        stack.callback(here.kill)
        args = ["-c", str(tmp_path / "polar.yaml")]
        yield World(here, there, cluster, fleet, client, args, tmp_path / "up.txt")


async def test_every_node_that_asks_for_one_has_a_gateway(world: World):
    world.cluster.start(world.here, gateway=1)
    with world.cluster.up(world.args, world.log) as up:
        assert set(await world.healthy(1)) == {world.here.address}
        world.cluster.start(world.there, gateway=1)
        names = await world.healthy(2)
        assert set(names) == {world.here.address, world.there.address}
        await world.client.submit(world.fleet.a_task("t", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        (process,) = world.gateway(world.there)
        process.kill()
        status = await check_all(world.fleet, world.client, "t", 24)
        assert {result.status for result in status.results} == {"COMPLETED"}
        assert {result.node_id for result in status.results} <= set(names.values())
        assert await world.healthy(2) == names, "Ray has started it again, under its name"
        assert world.gateway(world.there)[0].pid != process.pid
        with world.cluster.up(["--down"], world.log.with_name("down.txt")) as down:
            assert await asyncio.to_thread(down.wait, PATIENCE) == 0
        assert await asyncio.to_thread(up.wait, PATIENCE) == 0
    assert not world.gateway(world.here) + world.gateway(world.there)
    for path in world.cluster.folder.rglob("*"):
        if path.is_file():
            assert NODE.encode() not in path.read_bytes(), path


async def test_the_gateways_stay_when_nobody_follows(world: World):
    world.cluster.start(world.here, gateway=1)
    with world.cluster.up(world.args, world.log) as up:
        names = await world.healthy(1)
        up.terminate()
        assert await asyncio.to_thread(up.wait, PATIENCE) == 0
    await world.said("gateways stay")
    before = [each.pid for each in world.gateway(world.here)]
    with world.cluster.up(world.args, world.log):
        await world.said(*names.values())
        await world.client.submit(world.fleet.a_task("t", samples=4, turns=TURNS))
        await check_all(world.fleet, world.client, "t", 4)
    assert [each.pid for each in world.gateway(world.here)] == before


async def test_a_node_is_killed_and_hands_over_what_it_had_when_it_is_back(world: World):
    world.cluster.start(world.here, gateway=1)
    world.cluster.start(world.there, gateway=1)
    with world.cluster.up(world.args, world.log):
        names = await world.healthy(2)
        await world.client.submit(world.fleet.a_task("t", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        world.there.kill(but="tests.support.scripted")
        status = await world.client.wait("t")
        assert max(result.attempt for result in status.results) > 1, "a session was cut off"
        await world.said(f"gateway {names[world.there.address]} is lost")
        world.cluster.start(world.there, gateway=1)
        assert await world.healthy(2) == names
        await check_all(world.fleet, world.client, "t", 24)


async def test_a_node_is_cut_off_and_comes_back(world: World):
    world.cluster.start(world.here, gateway=1)
    world.cluster.start(world.there, gateway=1)
    with world.cluster.up(world.args, world.log):
        names = await world.healthy(2)
        await world.client.submit(world.fleet.a_task("t", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        world.there.plug(False)
        status = await world.client.wait("t")
        assert max(result.attempt for result in status.results) > 1, "a session was cut off"
        await world.said(f"gateway {names[world.there.address]} is lost")
        world.there.plug(True)
        async with asyncio.timeout(PATIENCE):  # Ray's own processes there end when they hear of it
            while world.gateway(world.there):
                await asyncio.sleep(0.1)
        world.cluster.start(world.there, gateway=1)
        assert await world.healthy(2) == names
        await check_all(world.fleet, world.client, "t", 24)


async def test_a_gateway_that_can_not_begin_is_said(world: World):
    settings = Path(world.args[1])
    settings.write_text(settings.read_text().replace("kind: openai", "kind: openai\n  mode: tito"))
    world.cluster.start(world.here, gateway=1)
    with world.cluster.up(world.args, world.log) as up:
        assert await asyncio.to_thread(up.wait, PATIENCE) == 1
    last = world.log.read_text().splitlines()[-1]
    assert last.startswith("polar: no gateway runs: ")
    assert "tito" in last
