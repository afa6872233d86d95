"""A service of real processes with real walls, for hostile agents: all in one process, or a server and a gateway."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from polar.client import RolloutClient
from polar.config import parse_task
from polar.rollout.wire import WireResult
from tests.attacks.inside import agent
from tests.cli.making import environment, start, task
from tests.support.ports import free_port

ADMIN, NODE = "admin-token-of-the-tests", "node-token-of-the-tests"
CALLS = 4
"""Calls in flight that a session may have."""
PATIENCE = 120.0
HIDING = 'def hide(text):\n    return text.replace("<{}>".format("xylophone"), "[gone]")\n'
"""What the operator takes out; the word itself is not in this file, nor in its bytecode."""


class Seen(NamedTuple):
    """How an attack went: the session's result, and what the agent told, by name."""

    result: WireResult
    told: dict[str, Any]


@dataclass
class Part:
    """A process of the service."""

    folder: Path
    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            assert self.process.poll() is None, (self.folder / "log.txt").read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise AssertionError((self.folder / "log.txt").read_text())


class Service:
    """Runs until the block ends. ``apart``: a rollout server, and a gateway of its own."""

    def __init__(self, folder: Path, engine_url: str, *, apart: bool) -> None:
        self.engine_url = engine_url
        self._folder = folder
        self._apart = apart
        self._tasks = 0
        self.parts: list[Part] = []

    def __enter__(self) -> Service:
        gateway: dict[str, Any] = {
            "engines": [{"kind": "openai", "url": self.engine_url}],
            "limits": {"drain_seconds": 5.0, "body_mb": 1, "calls_per_session": CALLS},
            "redaction": {"hooks": ["hiding:hide"]},
        }
        try:
            if self._apart:
                server = self._start("server", {"role": "rollout"})
                self._start("gateway", {**gateway, "role": "gateway", "node_id": "n1", "server": server.url})
            else:
                self._start("server", {**gateway, "node_id": "n1"})
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for part in self.parts:
            part.process.kill()
            part.process.wait(30)

    def _start(self, name: str, settings: dict[str, Any]) -> Part:
        port = free_port()
        folder = self._folder / name
        folder.mkdir()
        (folder / "hiding.py").write_text(HIDING)
        path = folder / "polar.yaml"
        path.write_text(yaml.safe_dump({**settings, "port": port, "out": "data"}))
        env = environment(POLAR_ADMIN_TOKEN=ADMIN, POLAR_NODE_TOKEN=NODE)
        with (folder / "log.txt").open("a") as log:
            process = start(["serve", "-c", path], folder, stdout=log, stderr=log, env=env)
        self.parts.append(Part(folder, port, process))
        self.parts[-1].wait()
        return self.parts[-1]

    @property
    def server(self) -> Part:
        """The process that has the control plane."""
        return self.parts[0]

    @property
    def gateway(self) -> Part:
        """The process that has the sandboxes."""
        return self.parts[-1]

    @property
    def sessions(self) -> Path:
        return self.gateway.folder / "data" / "sessions"

    @property
    def secret(self) -> Path:
        """A file that nobody but the server may read."""
        return self.server.folder / "data" / "callback.secret"

    def client(self) -> RolloutClient:
        return RolloutClient(self.server.url, ADMIN, patience=PATIENCE)

    async def attack(self, code: str, *, env: dict[str, str] | None = None, **changes: Any) -> Seen:
        """Run an agent to its end."""
        self._tasks += 1
        name = f"attack-{self._tasks}"
        shell = {
            "harness": "shell",
            "custom_shell": {"command": agent(code)},
            "settings": {"allow_no_model_call": True},
            "env": env or {},
        }
        async with self.client() as client, asyncio.timeout(PATIENCE):
            await client.submit(parse_task(task(name, agent=shell, timeout_seconds=100, **changes)))
            status = await client.wait(name)
        (result,) = status.results
        out = self.sessions / f"{name}-0" / "attempt-1" / "agent.stdout"
        lines = out.read_text().splitlines() if out.exists() else []
        return Seen(result, dict(json.loads(line) for line in lines if line.startswith("[")))

    async def audit(self) -> list[dict[str, Any]]:
        """The audit log, as an operator reads it."""
        async with self.client() as client:
            answer = await client.get("/audit", {"limit": 10_000})
            found: list[dict[str, Any]] = answer["entries"]
            return found
