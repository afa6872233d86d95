"""A rollout service of real processes, for tests that break it: servers, gateways, a scripted engine, and agents that
write down every reply they got, outside of Polar. ``check_all`` is what must hold after any fault.

``POLAR_FAULT_SEEDS`` says with how many seeds each random test is run (3 by default)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import yaml

from polar.client import RolloutClient
from polar.config import parse_task
from polar.contract.task import TaskRequest
from polar.rollout.wire import WireResult, WireTaskStatus
from tests.cli.making import POLAR, ScriptedProcess, agent, environment, task
from tests.e2e.oracle import check_against
from tests.support.ports import free_port

ADMIN, NODE = "admin-token-of-the-tests", "node-token-of-the-tests"
PATIENCE = 120.0
PRINTED = "*/data/sessions/*/attempt-*/agent.stdout"
TURNS = 6
SEEDS = range(int(os.environ.get("POLAR_FAULT_SEEDS", "3")))
GATES = tuple(f"hold until {name}" for name in ("up", "joined", "awake", "moved", "stopped", "halted", "known"))


@dataclass
class Part:
    """A process of the service that can be killed and started again as it was."""

    name: str
    settings: dict[str, Any]
    folder: Path
    prefix: Sequence[str] = ()
    """What the command line begins with."""
    node_token: str = NODE
    process: subprocess.Popen[str] | None = None
    seen: set[psutil.Process] = field(default_factory=set)
    """Everything that was seen below it: none of it may outlive it."""

    @property
    def url(self) -> str:
        url: str = self.settings.get("public_url") or f"http://127.0.0.1:{self.settings['port']}"
        return url

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def running(self) -> subprocess.Popen[str]:
        assert self.process is not None
        assert self.process.poll() is None, self.said()
        return self.process

    def said(self) -> str:
        return (self.folder / "log.txt").read_text()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "polar.yaml"
        path.write_text(yaml.safe_dump(self.settings))
        env = environment(POLAR_ADMIN_TOKEN=ADMIN, POLAR_NODE_TOKEN=self.node_token, POLAR_LOG="INFO")
        line = [*self.prefix, *POLAR, "serve", "-c", str(path)]
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(
                line, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, text=True
            )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            assert self.running
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError(self.said())

    async def says(self, *words: str) -> None:
        """Until its log has one of these."""
        await until(lambda: any(each in self.said() for each in words), f"{self.name} says {words}")

    def look(self) -> None:
        """Note what runs below it now."""
        if self.process is not None and self.process.poll() is None:
            self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))

    def kill(self) -> None:
        self.look()
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def signal(self, how: signal.Signals) -> None:
        self.look()
        self.running.send_signal(how)

    def stop(self) -> None:
        """SIGTERM, and see that it ends in order."""
        self.signal(signal.SIGTERM)
        self.ends(0)

    def ends(self, code: int) -> None:
        """Wait until it has ended, with this exit code."""
        assert self.process is not None
        assert self.process.wait(60) == code, self.said()

    def nothing_left(self) -> None:
        """Of all that was seen below it nothing runs."""
        _, alive = psutil.wait_procs(list(self.seen), timeout=20)
        assert not alive, [each.cmdline() for each in alive if each.is_running()]


class Fleet:
    """A service under one folder; with ``gateways=0`` all of it is one process. Gateways go to the servers in turn.

    Args:
        server: further settings of the servers; ``settings`` are those of all that run sessions.
    """

    def __init__(
        self,
        folder: Path,
        engine: ScriptedProcess,
        *,
        gateways: int = 0,
        servers: int = 1,
        sandbox: str = "none",
        server: dict[str, Any] | None = None,
        **settings: Any,
    ):
        self.folder = folder
        self.kept: dict[str, str] = {}
        """By completion id, the text of every reply that was found in the ledger."""
        self.engine = engine
        self.sandbox = sandbox
        node: dict[str, Any] = {
            "engines": [{"kind": "openai", "url": engine.url}],
            "pools": {"init": 4, "ready": 4, "run": 8, "post_run": 4},
            "limits": {"drain_seconds": 30.0},
            "runtimes": {"sandbox": sandbox},
            "out": "data",
            **settings,
        }
        of_server = {"out": "data", **(server or {})}
        if not gateways:
            self.servers = [
                Part("server", {**node, **of_server, "node_id": "all", "port": free_port()}, folder / "all")
            ]
        else:
            self.servers = [
                Part(f"server-{n}", {**of_server, "role": "rollout", "port": free_port()}, folder / f"server-{n}")
                for n in range(servers)
            ]
        self.gateways: list[Part] = []
        for n in range(gateways):
            own = {"role": "gateway", "node_id": f"node-{n}", "port": free_port()}
            to = {"server": self.servers[n % servers].url}
            self.gateways.append(Part(f"node-{n}", {**node, **own, **to}, folder / f"node-{n}"))

    @property
    def server(self) -> Part:
        return self.servers[0]

    @property
    def parts(self) -> list[Part]:
        return [*self.servers, *self.gateways]

    def __enter__(self) -> Fleet:
        for part in self.parts:
            part.start()
        for part in self.parts:
            part.wait()
        while len(self._nodes()) < len(self.gateways):
            time.sleep(0.05)
        return self

    def _nodes(self) -> list[Any]:
        request = urllib.request.Request(f"{self.server.url}/nodes", headers={"Authorization": f"Bearer {ADMIN}"})
        with urllib.request.urlopen(request, timeout=20) as reply:
            found: list[Any] = json.load(reply)
        return found

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            if part.process is not None:
                part.process.kill()
                part.process.wait(30)

    @asynccontextmanager
    async def client(self, server: Part | None = None) -> AsyncIterator[RolloutClient]:
        async with RolloutClient((server or self.server).url, ADMIN, patience=PATIENCE) as client:
            yield client

    def a_task(self, task_id: str, *, samples: int, turns: int = TURNS, **changes: Any) -> TaskRequest:
        """``samples`` sessions of an agent that makes ``turns`` calls."""
        shell: dict[str, Any] = {"harness": "shell", "custom_shell": {"command": agent(turns)}}
        if self.sandbox == "none":
            shell["env"] = {"RECEIVED": str(self.folder / "received.txt")}
        return parse_task(task(task_id, agent=shell, num_samples=samples, **changes))

    def received(self) -> dict[str, str]:
        """By completion id, the text of every reply that an agent has got: by its own record, which is a file out of
        Polar's reach, or where it is in a sandbox what it printed."""
        files = [self.folder / "received.txt"] if self.sandbox == "none" else self.folder.glob(PRINTED)
        lines = [json.loads(line)[-2:] for file in files for line in _whole_lines(file)]
        return {name.removeprefix("chatcmpl-"): reply for name, reply in lines}

    async def replies(self, count: int) -> None:
        """Until agents have got so many replies more."""
        enough = len(self.received()) + count
        await until(lambda: len(self.received()) >= enough, f"{enough} replies")

    async def in_flight(self, count: int) -> None:
        """Until the engine has so many calls that have not ended."""

        def running() -> int:
            return sum(each["ended"] == "running" for each in self.engine.generations())

        await until(lambda: running() >= count, f"{count} calls in flight")

    def release(self, gate: str) -> None:
        body = json.dumps({"hold": gate}).encode()
        request = urllib.request.Request(
            f"{self.engine.url}/scripted/release", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request):
            return

    def stop(self) -> None:
        """All that is alive ends in order; nothing is left of anything."""
        alive = [each for each in (*self.gateways, *self.servers) if each.process and each.process.poll() is None]
        for part in alive:
            part.stop()
        for part in self.parts:
            part.nothing_left()
        for part in alive:
            left = list(part.folder.rglob(".polar-sandbox"))
            assert not left, left


def _whole_lines(file: Path) -> list[str]:
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something in the world outside.

    Raises:
        AssertionError: it did not come.
    """
    end = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < end, f"not in time: {what}"
        await asyncio.sleep(0.05)


async def attempts(client: RolloutClient, task_id: str) -> list[int]:
    """The newest attempt of each session of a task."""
    return [each["attempt"] for each in (await client.get(f"/tasks/{task_id}/sessions"))["sessions"]]


async def taken_back(client: RolloutClient, task_id: str, count: int) -> None:
    """Until so many sessions of a task are at a further attempt."""
    end = time.monotonic() + PATIENCE
    while sum(attempt > 1 for attempt in await attempts(client, task_id)) < count:
        assert time.monotonic() < end, "not in time: a new attempt"
        await asyncio.sleep(0.05)


# ---- what must hold --------------------------------------------------------------------------------------


async def check_all(fleet: Fleet, client: RolloutClient, task_id: str, samples: int) -> WireTaskStatus:
    """What must hold of a task after whatever happened: see the assertions."""
    async with asyncio.timeout(PATIENCE):
        status = await client.wait(task_id)
    assert status.total_sessions == status.completed_sessions == samples == len(status.results), "counts add up"
    names = [result.session_id for result in status.results]
    assert len(set(names)) == samples, "no session has two results"
    assert {result.status for result in status.results} <= {"COMPLETED", "ERROR", "TIMEOUT"}
    calls = await _told_is_kept(fleet, client, status)
    generations = {each["request_id"]: each for each in await asyncio.to_thread(fleet.engine.generations)}
    for result in status.results:
        _check_result(result, [c for c in calls if c.session_id == result.session_id], generations)
    seen = [(each.session_id, each.attempt) async for each in client.results("checker", follow=False)]
    mine = [each for each in seen if each[0] in names]
    assert sorted(mine) == sorted((result.session_id, result.attempt) for result in status.results), "told once each"
    return status


def _check_result(result: WireResult, calls: list[Any], generations: dict[str, Any]) -> None:
    """Every call of the newest attempt has one fate, and its tokens are the engine's own; so are older ones'."""
    newest = [each for each in calls if each.attempt == result.attempt]
    fates = result.trajectory.metadata["reconstruction"]["completions"]
    told = sorted(name for names in fates.values() for name in names)
    assert told == sorted(each.completion_id for each in newest), (result.session_id, fates)
    whole = [each for each in newest if each.completion_id in fates.get("trained", [])]
    check_against([generations[each.completion_id] for each in whole], whole, [result])
    for each in calls:
        generation = generations.get(each.completion_id)  # none where the call was given up before the engine had it
        sampled = generation["sampled_ids"] if generation is not None else []
        assert each.response_ids.tolist() == sampled[: len(each.response_ids)]


async def _told_is_kept(fleet: Fleet, client: RolloutClient, status: WireTaskStatus) -> list[Any]:
    """All captured calls of a task. What cut-off attempts were told may arrive later, from their nodes' journals."""
    told, end = fleet.received(), time.monotonic() + PATIENCE
    while True:
        calls = [call for result in status.results for call in await _calls(client, result.session_id)]
        kept = {each.completion_id: each.text for each in calls}
        assert len(kept) == len(calls), "a call is there twice"
        fleet.kept |= kept
        if {name: fleet.kept.get(name) for name in told} == told:
            return calls
        assert time.monotonic() < end, f"told and not in the ledger: {sorted(told.keys() - fleet.kept.keys())}"
        await asyncio.sleep(0.2)


async def _calls(client: RolloutClient, session_id: str) -> list[Any]:
    answer = await client.get(f"/sessions/{session_id}/completions", {"attempt": "all"})
    return [
        SimpleNamespace(
            completion_id=each["completion_id"],
            session_id=session_id,
            attempt=each["attempt"],
            text=each["response"]["choices"][0]["message"]["content"],
            response_ids=np.array(each["response_ids"], np.int32),
            logprobs=np.array(each["logprobs"], np.float32),
            outcome="ok",  # none is given up: each has its generation
        )
        for each in answer["completions"]
    ]
