"""``polar serve`` as one process: its start and its end, and a heartbeat that crosses the end of a session."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from polar import service
from polar.contract.arrays import to_json
from polar.contract.errors import UsageError
from polar.contract.rollout import Delivery, Heartbeat, HeartbeatReply
from polar.gateway import worker
from polar.gateway.coordinator import LocalCoordinator
from polar.settings import ServeConfig, load_settings
from tests.rollout.making import TOKENS, task
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.tinymodel import make_tiny_model

ENVIRON = {"POLAR_ADMIN_TOKEN": TOKENS["admin"], "POLAR_NODE_TOKEN": TOKENS["node"]}
QUICK = {"harness": "shell", "custom_shell": {"command": "true"}, "settings": {"allow_no_model_call": True}}


def settings(folder: Path, engine_url: str, **more: Any) -> ServeConfig:
    engines = [{"kind": "openai", "url": engine_url}]
    said = {"port": 0, "node_id": "n", "out": str(folder / "out"), "engines": engines}
    return load_settings(None, {**said, "runtimes": {"sandbox": "none"}, **more})


class Crossing(LocalCoordinator):
    """Answers a heartbeat only once a session that it names has ended, and lets that end be known only after the
    answer was heard."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked, self.kept, self.heard = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.lost: list[str] = []

    async def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        if self.lost:
            self.heard.set()
        if beat.held:
            self.asked.set()
            await self.kept.wait()
        reply = await super().heartbeat(beat)
        self.lost += reply.lost
        return reply

    async def deliver(self, delivery: Delivery) -> None:
        await self.asked.wait()
        await super().deliver(delivery)
        self.kept.set()
        await self.heard.wait()


async def test_a_heartbeat_that_crosses_the_end_of_a_session_is_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Crossing] = []

    def crossing(*args: Any) -> Crossing:
        made.append(Crossing(*args))
        return made[0]

    monkeypatch.setattr(service, "LocalCoordinator", crossing)
    monkeypatch.setattr(worker, "HEARTBEAT_SECONDS", 0.05)
    async with scripted_engine(make_tiny_model(tmp_path / "model"), [Step(text="one")]) as engine:
        running = service.Service(settings(tmp_path, engine.url), ENVIRON)
        await running.start()
        try:
            headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
            async with httpx.AsyncClient(
                base_url=running.url, headers=headers, timeout=60, trust_env=False
            ) as client:
                body = to_json(task(agent=QUICK))
                assert (await client.post("/rollout/task/submit", content=body)).status_code == 200
                status = (await client.get("/rollout/task/t1", params={"wait": 50})).json()
                nowhere = await client.get("/tsks")
        finally:
            await running.close()
    assert [each["status"] for each in status["results"]] == ["COMPLETED"], status
    assert set(made[0].lost) == {"t1-0"}, "the answer crossed the end"
    assert "lost the leases" not in caplog.text
    assert (nowhere.status_code, nowhere.json()) == (404, {"detail": "nothing is served at GET /tsks"})


async def test_a_start_on_a_taken_port_writes_nothing(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = settings(tmp_path, "http://127.0.0.1:1", port=other.getsockname()[1])
        with pytest.raises(UsageError, match="another program has that address"):
            await service.serve(config, {}, asyncio.Event(), lambda _: None)
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_that_can_not_be_made_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    config = settings(tmp_path, "http://127.0.0.1:1", out=str(tmp_path / "file" / "out"))
    with pytest.raises(UsageError, match=r"file/out can't be made \(Not a directory\): take another --out"):
        await service.serve(config, {}, asyncio.Event(), lambda _: None)


async def test_a_service_that_is_told_to_stop_before_it_has_started_ends(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        with suppress(OSError):
            await reader.read()
        writer.close()

    engine = await asyncio.start_server(silent, "127.0.0.1", 0)
    stop, said = asyncio.Event(), list[str]()
    config = settings(tmp_path, f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}")
    try:
        serving = asyncio.create_task(service.serve(config, {}, stop, said.append))
        async with asyncio.timeout(20):
            await asked.wait()
            stop.set()
            await serving
    finally:
        engine.close()
    assert said == [], "it never served"
    assert list((tmp_path / "out").iterdir()) == []


async def test_a_model_that_is_loaded_is_named_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    config = load_settings(
        None, {"port": 0, "out": str(tmp_path / "out"), "engines": [{"kind": "local", "model": str(tmp_path / "m")}]}
    )
    with pytest.raises(UsageError):
        await service.serve(config, {}, asyncio.Event(), said.append)
    assert said == [f"loading {tmp_path / 'm'} ..."]
