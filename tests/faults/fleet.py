"""A rollout service of real processes on loopback, for tests that break it: a server, gateways, a scripted engine,
and agents that write down every reply they got, outside of Polar."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from polar.client import RolloutClient
from polar.config import parse_task
from polar.contract.completion import Completion
from polar.contract.task import TaskRequest
from polar.rollout.wire import WireResult, WireTaskStatus
from tests.cli.making import agent, environment, start, task

ADMIN, NODE = "admin-token-of-the-tests", "node-token-of-the-tests"
PATIENCE = 120.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@dataclass
class Part:
    """A process of the service that can be killed and started again as it was."""

    name: str
    settings: dict[str, Any]
    folder: Path
    process: subprocess.Popen[str] | None = None
    seen: list[psutil.Process] = field(default_factory=list)
    """Everything that it ever started and that was seen: none of it may outlive it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings['port']}"

    def start(self, prefix: list[str] | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "polar.yaml"
        path.write_text(yaml.safe_dump(self.settings))
        log = (self.folder / "log.txt").open("a")
        env = environment(
            POLAR_ADMIN_TOKEN=ADMIN,
            POLAR_NODE_TOKEN=NODE,
            POLAR_LOG="INFO",
            RECEIVED=str(self.folder / "received.txt"),
        )
        self.process = start(["serve", "-c", path], self.folder, stdout=log, stderr=log, env=env)
        log.close()

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError((self.folder / "log.txt").read_text())

    def look(self) -> None:
        """Note what runs below it now."""
        if self.process is not None and self.process.poll() is None:
            self.seen += psutil.Process(self.process.pid).children(recursive=True)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.look()
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            if how == signal.SIGKILL:
                self.process.wait(30)

    def end(self) -> None:
        self.look()
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def nothing_left(self) -> None:
        """Of all that it ever started nothing runs, and no sandbox lies about that nobody owns."""
        _, alive = psutil.wait_procs(self.seen, timeout=20)
        assert not alive, [each.cmdline() for each in alive if each.is_running()]


class Fleet:
    """A service under one folder; with ``gateways=0`` all of it is one process."""

    def __init__(
        self, folder: Path, engine_url: str, *, gateways: int = 0, store: str | None = None, **settings: Any
    ):
        self.folder = folder
        common: dict[str, Any] = {
            "engines": [{"kind": "openai", "url": engine_url}],
            "pools": {"init": 4, "ready": 4, "run": 8, "post_run": 4},
            "limits": {"drain_seconds": 5.0},
            "runtimes": {"sandbox": "none"},
            **settings,
        }
        server: dict[str, Any] = {"port": free_port(), "out": "data"}
        if store is not None:
            server["store"] = store
        if not gateways:
            self.server = Part("server", {**common, **server, "node_id": "all"}, folder / "server")
            self.gateways: list[Part] = []
        else:
            self.server = Part("server", {**server, "role": "rollout"}, folder / "server")
            self.gateways = [
                Part(
                    f"node-{index}",
                    {
                        **common,
                        "role": "gateway",
                        "port": free_port(),
                        "out": "data",
                        "node_id": f"node-{index}",
                        "server": self.server.url,
                    },
                    folder / f"node-{index}",
                )
                for index in range(gateways)
            ]

    @property
    def parts(self) -> list[Part]:
        return [self.server, *self.gateways]

    def __enter__(self) -> Fleet:
        self.server.start()
        for part in self.gateways:
            part.start()
        for part in self.parts:
            part.wait()
        return self

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part.end()

    def client(self) -> RolloutClient:
        return RolloutClient(self.server.url, ADMIN, patience=PATIENCE)

    def a_task(self, task_id: str, *, samples: int, turns: int, **changes: Any) -> TaskRequest:
        """``samples`` sessions of an agent that makes ``turns`` calls."""
        shell = {
            "harness": "shell",
            "custom_shell": {"command": agent(turns)},
            "env": {"RECEIVED": str(self.folder / "received.txt")},
        }
        return parse_task(task(task_id, agent=shell, num_samples=samples, **changes))

    def received(self) -> dict[str, str]:
        """By completion id, the text of every reply that an agent has got."""
        path = self.folder / "received.txt"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        return {name.removeprefix("chatcmpl-"): reply for _, name, reply in lines}

    async def replies(self, count: int) -> None:
        """Until agents have got so many replies."""
        async with asyncio.timeout(PATIENCE):
            while len(self.received()) < count:
                await asyncio.sleep(0.01)


async def ended(client: RolloutClient, task_id: str) -> WireTaskStatus:
    async with asyncio.timeout(PATIENCE):
        return await client.wait(task_id)


async def every_completion(client: RolloutClient, status: WireTaskStatus) -> dict[str, dict[str, Any]]:
    """By id, the captured calls of every attempt of a task's sessions, as the service shows them."""
    found: dict[str, dict[str, Any]] = {}
    for result in status.results:
        answer = await client.get(f"/sessions/{result.session_id}/completions", {"attempt": "all"})
        for each in answer["completions"]:
            assert each["completion_id"] not in found, "a call is there twice"
            found[each["completion_id"]] = {**each, "session_id": result.session_id}
    return found


def accounted(result: WireResult, completions: list[Completion] | list[str]) -> None:
    """Every call of the newest attempt has one fate."""
    fates = result.trajectory.metadata["reconstruction"]["completions"]
    told = sorted(name for names in fates.values() for name in names)
    assert told == sorted(completions), (result.session_id, told)


async def check_all(fleet: Fleet, client: RolloutClient, task_id: str, samples: int) -> WireTaskStatus:
    """What must hold of a task after whatever happened: see the assertions."""
    status = await ended(client, task_id)
    assert status.total_sessions == status.completed_sessions == samples == len(status.results), "counts add up"
    names = [result.session_id for result in status.results]
    assert len(set(names)) == samples, "no session has two results"
    completions = await every_completion(client, status)
    kept = {name: each["response"]["choices"][0]["message"]["content"] for name, each in completions.items()}
    told = fleet.received()
    assert {name: kept.get(name) for name in told} == told, "a reply was told and is not in the ledger"
    for result in status.results:
        of_attempt = [
            name
            for name, each in completions.items()
            if each["session_id"] == result.session_id and each["attempt"] == result.attempt
        ]
        accounted(result, of_attempt)
    seen = [(each.session_id, each.attempt) async for each in client.results("checker", follow=False)]
    mine = [each for each in seen if each[0] in names]
    assert sorted(mine) == sorted((result.session_id, result.attempt) for result in status.results), "told once each"
    return status
