"""Nodes and servers that are away for longer than a lease, and come back: what was given to another meanwhile is left
alone, what was not goes on, and whatever agents were told in between is kept."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar.rollout.dispatch import LEASE_SECONDS
from tests.cli.making import ScriptedProcess
from tests.faults.fleet import Fleet, check_all, taken_back, until
from tests.support.missing import missing

pytestmark = pytest.mark.slow

REFUSED = "attempt 1 is over"
"""What the server says to a result that comes too late."""


async def test_a_server_that_was_down_for_longer_than_a_lease_costs_no_attempt(
    engine: ScriptedProcess, tmp_path: Path
):
    gate, samples = "hold until up", 12
    with Fleet(tmp_path, engine, gateways=2) as fleet:
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=3, instruction=gate))
            await fleet.in_flight(8)
            fleet.server.kill()
            await asyncio.sleep(1.5 * LEASE_SECONDS)
            fleet.server.start()
            fleet.server.wait()
            await asyncio.sleep(LEASE_SECONDS / 4)  # some looks for lapsed leases
            fleet.release(gate)
            status = await check_all(fleet, client, "t", samples)
            assert {(each.status, each.attempt) for each in status.results} == {("COMPLETED", 1)}
        fleet.stop()


async def test_a_node_that_never_comes_back_is_waited_for_no_longer_than_a_lease_after_a_start(
    engine: ScriptedProcess, tmp_path: Path
):
    gate, samples = "hold until joined", 4
    with Fleet(tmp_path, engine, gateways=2) as fleet:
        async with fleet.client() as client:
            lost, other = fleet.gateways
            other.kill()
            await client.submit(fleet.a_task("t", samples=samples, turns=3, instruction=gate))
            await fleet.in_flight(samples)
            fleet.server.kill()
            lost.kill()
            fleet.server.start()
            other.start()
            await taken_back(client, "t", samples)
            fleet.release(gate)
            status = await check_all(fleet, client, "t", samples)
            assert {(r.status, r.attempt, r.node_id) for r in status.results} == {("COMPLETED", 2, other.name)}
        fleet.stop()


async def test_a_node_that_was_paused_does_no_harm_when_it_wakes(engine: ScriptedProcess, tmp_path: Path):
    gate, samples = "hold until awake", 4
    with Fleet(tmp_path, engine, gateways=2) as fleet:
        async with fleet.client() as client:
            paused, other = fleet.gateways
            other.stop()
            await client.submit(fleet.a_task("t", samples=samples, turns=3, instruction=gate))
            await fleet.in_flight(samples)
            paused.signal(signal.SIGSTOP)
            other.start()
            await taken_back(client, "t", samples)
            fleet.release(gate)
            await fleet.replies(1)
            paused.signal(signal.SIGCONT)
            await paused.says("lost the leases", REFUSED)
            status = await check_all(fleet, client, "t", samples)
            assert {(r.status, r.attempt, r.node_id) for r in status.results} == {("COMPLETED", 2, other.name)}
            other.stop()  # and it works on
            await client.submit(fleet.a_task("more", samples=samples, turns=2))
            more = await check_all(fleet, client, "more", samples)
            assert {(r.status, r.attempt, r.node_id) for r in more.results} == {("COMPLETED", 1, paused.name)}
        fleet.stop()


async def test_a_server_that_does_not_know_the_node_refuses_nothing_for_good(engine: ScriptedProcess, tmp_path: Path):
    gate, samples = "hold until known", 4
    with Fleet(tmp_path, engine, gateways=1) as fleet:
        (gateway,) = fleet.gateways
        async with fleet.client() as client:
            await client.submit(fleet.a_task("t", samples=samples, turns=2, instruction=gate))
            await fleet.in_flight(samples)
            fleet.server.kill()
            fleet.release(gate)
            await until(lambda: len(fleet.received()) == 2 * samples, "every agent has its replies")
            fleet.server.node_token = "another-token-of-the-tests"
            fleet.server.start()
            await asyncio.to_thread(gateway.ends, 2)
            assert "set POLAR_NODE_TOKEN" in gateway.said()
            fleet.server.kill()
            fleet.server.node_token = gateway.node_token
            fleet.server.start()
            gateway.start()
            status = await check_all(fleet, client, "t", samples)
            assert {each.status for each in status.results} == {"COMPLETED"}
        fleet.stop()


# ---- a network that is cut -------------------------------------------------------------------------------


@dataclass
class Network:
    """The server's machine: a network of its own, with a link to it for each gateway."""

    name: str
    addresses: tuple[str, str]

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]

    def link(self, index: int, state: str) -> None:
        """``down`` at the far end: what is sent there vanishes."""
        ip(*self.prefix[1:], "ip", "link", "set", f"far{index}", state)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, timeout=20)


@pytest.fixture
def network() -> Iterator[Network]:
    name = uuid.uuid4().hex[:8]
    made = Network(f"polar-{name}", ("10.231.1.2", "10.231.2.2"))
    try:
        ip("netns", "add", made.name)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or "no ip command (Debian: iproute2)"
        missing(f"no network of its own can be made here (that takes root): {why}")
    try:
        ip("-n", made.name, "link", "set", "lo", "up")
        for index, address in enumerate(made.addresses):
            near = f"p{name}{index}"
            ip("link", "add", near, "type", "veth", "peer", "name", f"far{index}", "netns", made.name)
            ip("addr", "add", f"{address[:-1]}1/24", "dev", near)
            ip("link", "set", near, "up")
            ip("-n", made.name, "addr", "add", f"{address}/24", "dev", f"far{index}")
            made.link(index, "up")
        yield made
    finally:
        ip("netns", "del", made.name)


async def test_a_node_that_was_cut_off_is_fenced_and_its_calls_still_arrive(
    engine: ScriptedProcess, network: Network, tmp_path: Path
):
    gate, samples = "hold until moved", 4
    fleet = Fleet(tmp_path, engine, gateways=2, server={"host": "0.0.0.0", "insecure": True})
    fleet.server.prefix = network.prefix
    port = fleet.server.settings["port"]
    fleet.server.settings["public_url"] = f"http://{network.addresses[1]}:{port}"
    cut, other = fleet.gateways
    cut.settings["server"] = f"http://{network.addresses[0]}:{port}"
    other.settings["server"] = fleet.server.url
    with fleet:
        async with fleet.client() as client:
            other.stop()
            await client.submit(fleet.a_task("t", samples=samples, turns=3, instruction=gate))
            await fleet.in_flight(samples)
            other.start()
            network.link(0, "down")
            fleet.release(gate)  # its agents go on: what they are told now, the server can't hear of
            await taken_back(client, "t", samples)
            await until(lambda: len(fleet.received()) == 2 * 3 * samples, "all agents of both have their replies")
            network.link(0, "up")
            await cut.says(REFUSED)
            status = await check_all(fleet, client, "t", samples)
            assert {(r.status, r.attempt, r.node_id) for r in status.results} == {("COMPLETED", 2, other.name)}
            for each in status.results:
                shown = await client.get(f"/sessions/{each.session_id}/completions", {"attempt": "1"})
                assert len(shown["completions"]) == 3, "the history of the attempt that was cut off"
        fleet.stop()
