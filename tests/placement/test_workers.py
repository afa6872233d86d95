"""``workers: 2``: two gateway nodes of real processes behind one port, with a rollout server apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from polar.client import RolloutClient
from polar.contract.rollout import BARE_NODE
from tests.cli.making import Forked, ScriptedProcess, refused
from tests.faults.fleet import ADMIN, NODE, PATIENCE, Fleet, check_all
from tests.placement.conftest import TURNS

pytestmark = pytest.mark.slow
AS_SERVER = {"Authorization": f"Bearer {NODE}"}


def workers_of(fleet: Fleet) -> list[psutil.Process]:
    """The worker processes, in order of their start."""
    process = fleet.gateways[0].process
    assert process is not None
    below = psutil.Process(process.pid).children()
    found = [each for each in below if "spawn_main" in " ".join(each.cmdline())]
    return sorted(found, key=lambda each: each.create_time())


async def healthy(client: RolloutClient, count: int) -> list[str]:
    """Until so many workers are; the ids of their nodes."""
    async with asyncio.timeout(PATIENCE):
        while True:
            nodes = await client.nodes()
            if sum(node.workers for node in nodes if node.healthy) == count:
                return [node.node_id for node in nodes]
            await asyncio.sleep(0.05)


@pytest.fixture
async def running(engine: ScriptedProcess, tmp_path: Path) -> AsyncIterator[tuple[Fleet, RolloutClient]]:
    fleet = Fleet(tmp_path, engine, gateways=1)
    fleet.gateways[0].settings["workers"] = 2
    with fleet:
        async with fleet.client() as client:
            await healthy(client, 2)
            yield fleet, client
    fleet.gateways[0].nothing_left()


async def ask(http: aiohttp.ClientSession, url: str, key: str, text: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        answer: dict[str, Any] = await reply.json()
        name: str = answer["id"]
        return name.removeprefix("chatcmpl-")


async def test_bare_sessions_of_both_workers_are_reached_on_the_one_port(running: tuple[Fleet, RolloutClient]):
    fleet, client = running
    assert await healthy(client, 2) == ["node-0"]
    port = fleet.gateways[0].url
    # A connection for each call: the kernel gives it to either worker.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        opened = []
        for index in (0, 1):
            asked = {"session_id": f"bare-{index}", "metadata": {BARE_NODE: f"node-0-{index}"}}
            async with http.post(f"{port}/workers/{index}/sessions", json=asked, headers=AS_SERVER) as reply:
                opened.append(await reply.json())
        assert [each["base_urls"]["openai"] for each in opened] == [f"{port}/v1"] * 2
        told = [
            await asyncio.gather(*(ask(http, f"{port}/v1", each["api_key"], f"call {call}") for call in range(20)))
            for each in opened
        ]
        async with http.post(
            f"{port}/v1/chat/completions", json={}, headers={"Authorization": "Bearer sk-polar-1.wrong"}
        ) as reply:
            assert reply.status == 401
        for index in (0, 1):
            url = f"{port}/workers/{index}/sessions/bare-{index}/close"
            async with http.post(url, headers=AS_SERVER) as reply:
                assert (await reply.json())["closed"]
    journals = [(fleet.gateways[0].folder / "data" / f"worker-{index}" / "journal.db").exists() for index in (0, 1)]
    assert journals == [True, True]
    assert all(len(set(names)) == 20 for names in told)


async def test_a_bare_session_opened_at_the_server_is_used_and_closed(running: tuple[Fleet, RolloutClient]):
    fleet, client = running
    admin = {"Authorization": f"Bearer {ADMIN}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        async with http.post(f"{fleet.server.url}/sessions", json={"session_id": "bare"}, headers=admin) as reply:
            opened = await reply.json()
        url, key = opened["base_urls"]["openai"], opened["api_key"]
        told = [await ask(http, url, key, f"call {call}") for call in range(6)]
        async with http.post(f"{fleet.server.url}/sessions/bare/close", headers=admin) as reply:
            assert (await reply.json())["closed"]
    async with asyncio.timeout(PATIENCE):
        while (await client.get("/sessions/bare"))["status"] != "COMPLETED":
            await asyncio.sleep(0.05)
    kept = (await client.get("/sessions/bare/completions"))["completions"]
    assert [each["completion_id"] for each in kept] == told


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_worker_is_killed_and_comes_back(running: tuple[Fleet, RolloutClient], victim: int):
    fleet, client = running
    await client.submit(fleet.a_task("t", samples=24, turns=TURNS))
    await fleet.replies(8)
    fleet.gateways[0].look()
    process = workers_of(fleet)[victim]
    process.kill()
    status = await check_all(fleet, client, "t", 24)
    assert {result.status for result in status.results} == {"COMPLETED"}
    assert {result.node_id for result in status.results} == {"node-0-0", "node-0-1"}
    assert await healthy(client, 2)
    assert len(workers_of(fleet)) == 2


async def test_sigterm_drains_both(running: tuple[Fleet, RolloutClient]):
    fleet, client = running
    await client.submit(fleet.a_task("t", samples=12, turns=TURNS))
    await fleet.replies(4)
    gateway = fleet.gateways[0]
    await asyncio.to_thread(gateway.stop)
    gateway.nothing_left()
    gateway.start()
    status = await check_all(fleet, client, "t", 12)
    assert {result.status for result in status.results} == {"COMPLETED"}


async def test_the_first_process_is_killed_and_its_workers_with_it(running: tuple[Fleet, RolloutClient]):
    fleet, client = running
    await client.submit(fleet.a_task("t", samples=12, turns=TURNS))
    await fleet.replies(4)
    gateway = fleet.gateways[0]
    gateway.kill()
    _, alive = psutil.wait_procs(list(gateway.seen), timeout=20)
    assert not alive
    gateway.start()
    await check_all(fleet, client, "t", 12)


def test_what_can_not_be_is_said(polar: Forked, tmp_path: Path):
    assert refused(polar(["serve", "--workers", "2"], tmp_path), 2, "workers", "--role gateway")
    gateway = ["serve", "--role", "gateway", "--server", "http://127.0.0.1:1", "--engine", "openai"]
    assert refused(polar([*gateway, "--workers", "0"], tmp_path), 2, "workers", "1 or more")
