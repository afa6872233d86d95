"""Gateways on a real Ray cluster of two hosts: whatever happens to actors, nodes and the wire, every session ends
once, and nothing that an agent was told is lost.

A cluster takes long to start, so there is one for all of them: a test goes on with what the one before has left, and
starts what is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from polar.client import RolloutClient
from tests.faults.fleet import NODE, PATIENCE, check_all
from tests.placement.cluster import Cluster, ray_venv
from tests.placement.conftest import TURNS
from tests.placement.hosts import Host
from tests.placement.site import OnSite, Site, short_folder, two_host_site

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.slow]


@dataclass
class World(OnSite):
    """A site, and a Ray cluster that begins on its first host."""

    cluster: Cluster
    client: RolloutClient
    log: Path
    """What ``polar up`` says."""

    @property
    def args(self) -> list[str]:
        return ["-c", str(self.site.config)]

    async def said(self, *words: str) -> None:
        """Until ``polar up`` has said all of this."""
        async with asyncio.timeout(PATIENCE):
            while missing := [word for word in words if word not in self.log.read_text()]:
                await asyncio.sleep(0.1)
                assert missing

    async def healthy(self, count: int) -> dict[str, str]:
        return await self.site.healthy(self.client, count)

    async def placed(self) -> dict[str, str]:
        """Until both hosts have a gateway that ``polar up`` follows; their ids, by address."""
        names = await self.healthy(2)
        await self.said(*(f"gateway {name} placed" for name in names.values()))
        return names

    def gateway(self, host: Host) -> list[psutil.Process]:
        """The processes that are the actor on this host."""
        return host.running("GatewayActor")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Cluster]]:
    venv = ray_venv()  # while there is a way out
    with short_folder("ray") as ray, two_host_site(tmp_path_factory.mktemp("site")) as site:
        cluster = Cluster(site.here, ray, venv)
        cluster.start(site.here, gateway=1)
        yield site, cluster


@pytest.fixture
async def world(begun: tuple[Site, Cluster], tmp_path: Path) -> AsyncIterator[World]:
    site, cluster = begun
    async with site.fleet.client() as client:
        yield World(site, cluster, client, tmp_path / "up.txt")


async def test_a_gateway_that_can_not_begin_is_said(world: World, tmp_path: Path):
    settings = tmp_path / "polar.yaml"
    settings.write_text(world.site.config.read_text().replace("kind: openai", "kind: openai\n  mode: tito"))
    with world.cluster.up(["-c", str(settings)], world.log) as up:
        assert await asyncio.to_thread(up.wait, PATIENCE) == 1
    last = world.log.read_text().splitlines()[-1]
    assert last.startswith("polar: no gateway runs: ")
    assert "tito" in last


async def test_the_gateways_stay_when_nobody_follows(world: World):
    with world.cluster.up(world.args, world.log) as up:
        names = await world.healthy(1)
        up.terminate()
        assert await asyncio.to_thread(up.wait, PATIENCE) == 0
    await world.said("gateways stay")
    before = [each.pid for each in world.gateway(world.here)]
    with world.cluster.up(world.args, world.log):
        await world.said(*names.values())
        await world.client.submit(world.fleet.a_task("stay", samples=4, turns=TURNS))
        await check_all(world.fleet, world.client, "stay", 4)
    assert [each.pid for each in world.gateway(world.here)] == before


async def test_a_node_that_comes_gets_a_gateway_that_is_started_again_when_it_dies(world: World):
    with world.cluster.up(world.args, world.log):
        assert set(await world.healthy(1)) == {world.here.address}
        world.cluster.need(world.there, gateway=1)
        names = await world.placed()
        assert set(names) == {world.here.address, world.there.address}
        await world.client.submit(world.fleet.a_task("dies", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        (process,) = world.gateway(world.there)
        process.kill()
        status = await check_all(world.fleet, world.client, "dies", 24)
        assert {result.status for result in status.results} == {"COMPLETED"}
        assert {result.node_id for result in status.results} <= set(names.values())
        assert await world.healthy(2) == names, "Ray has started it again, under its name"
        assert world.gateway(world.there)[0].pid != process.pid


async def test_a_node_is_killed_and_hands_over_what_it_had_when_it_is_back(world: World):
    world.cluster.need(world.there, gateway=1)
    with world.cluster.up(world.args, world.log):
        names = await world.placed()
        await world.client.submit(world.fleet.a_task("killed", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        world.there.kill(but="tests.support.scripted")
        status = await world.client.wait("killed")
        assert max(result.attempt for result in status.results) > 1, "a session was cut off"
        await world.said(f"gateway {names[world.there.address]} is lost")
        world.cluster.start(world.there, gateway=1)
        assert await world.healthy(2) == names
        await check_all(world.fleet, world.client, "killed", 24)


async def test_a_node_is_cut_off_and_comes_back(world: World):
    world.cluster.need(world.there, gateway=1)
    with world.cluster.up(world.args, world.log):
        names = await world.placed()
        await world.client.submit(world.fleet.a_task("cut", samples=24, turns=TURNS))
        await world.fleet.replies(8)
        world.there.plug(False)
        status = await world.client.wait("cut")
        assert max(result.attempt for result in status.results) > 1, "a session was cut off"
        await world.said(f"gateway {names[world.there.address]} is lost")
        world.there.plug(True)
        async with asyncio.timeout(PATIENCE):  # Ray's own processes there end when they hear of it
            while world.gateway(world.there) or world.there.running("raylet/raylet"):
                await asyncio.sleep(0.1)
        world.cluster.start(world.there, gateway=1)
        assert await world.healthy(2) == names
        await check_all(world.fleet, world.client, "cut", 24)


async def test_all_are_taken_down_and_have_left_no_token(world: World):
    world.cluster.need(world.there, gateway=1)
    with world.cluster.up(world.args, world.log) as up:
        await world.placed()
        with world.cluster.up(["--down"], world.log.with_name("down.txt")) as down:
            assert await asyncio.to_thread(down.wait, PATIENCE) == 0
        assert await asyncio.to_thread(up.wait, PATIENCE) == 0
    assert not world.gateway(world.here) + world.gateway(world.there)
    for path in world.cluster.folder.rglob("*"):
        if path.is_file():
            assert NODE.encode() not in path.read_bytes(), path
