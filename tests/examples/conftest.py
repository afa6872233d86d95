"""A real ``polar serve`` in a process of its own, before a scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.making import REPO, agent, environment, scripted_process, start, task
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model

TOKEN, SECRET = "admin-token-of-the-examples", "whsec_c2VjcmV0IG9mIHRoZSBleGFtcGxlcw=="


@dataclass
class Service:
    """Where it is, and an environment in which its clients find it."""

    url: str
    env: dict[str, str]

    def ask(self, path: str, body: Any = None) -> bytes:
        """A GET; with a body, a POST."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=60) as reply:
            return bytes(reply.read())

    def submit(self, task_id: str, **changes: Any) -> None:
        """A task of one-turn sessions."""
        shell = {"harness": "shell", "custom_shell": {"command": agent(1)}}
        self.ask("/rollout/task/submit", task(task_id, agent=shell, **changes))

    def run(self, *args: str | Path) -> subprocess.Popen[str]:
        """A Python program that is a client of it."""
        line = [sys.executable, *map(str, args)]
        return subprocess.Popen(
            line, cwd=REPO, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    env = environment(
        POLAR_HOME=str(folder / "home"), POLAR_ADMIN_TOKEN=TOKEN, POLAR_TOKEN=TOKEN, POLAR_CALLBACK_SECRET=SECRET
    )
    steps = [Step(text=f"reply {turn}") for turn in range(4)]
    with scripted_process(make_tiny_model(folder / "model"), steps, folder / "engine") as engine:
        line = ["serve", "--port", "0", "--no-sandbox", "--out", folder / "out"]
        with (folder / "log.txt").open("w") as log:
            process = start(
                [*line, "--engine", "vllm", "--engine-url", engine.url], folder, stdout=log, stderr=log, env=env
            )
        try:
            url = address(process, folder / "log.txt")
            yield Service(url, {**env, "POLAR_SERVER": url})
        finally:
            process.kill()
            process.wait()


def address(process: subprocess.Popen[str], log: Path) -> str:
    """What it says where it serves, once it does."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving at "):
                return line.removeprefix("serving at ")
        time.sleep(0.05)
    raise AssertionError(log.read_text())
