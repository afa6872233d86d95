"""What the command line says of engine servers without being asked, and when it is asked."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from tests.cli.making import run
from tests.support.router import WORKER, router
from tests.support.script import Step
from tests.support.scripted import scripted_engine
from tests.support.scripted_sglang import scripted_sglang
from tests.support.tinymodel import make_tiny_model

NO_TOKENS = ("/inference/v1/generate", "/v1/completions")


async def test_a_server_that_can_only_chat_is_said_to_with_the_fix(tmp_path: Path) -> None:
    async with scripted_engine(make_tiny_model(tmp_path / "model"), [Step(text="one")], off=NO_TOKENS) as engine:
        line = ["capture", "--engine", "vllm", "--engine-url", engine.url, "--out", "out", "--", "echo", "hi"]
        done = await asyncio.to_thread(run, line, tmp_path)
    assert done.out == "hi\n"
    (said,) = [each for each in done.err.splitlines() if engine.url in each]
    assert "is used in chat mode" in said
    assert "--enable-scale-out" in said


async def test_doctor_asks_each_of_several_servers(tmp_path: Path) -> None:
    async with scripted_engine(make_tiny_model(tmp_path / "model"), [Step(text="one")]) as engine:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            away = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            done = await asyncio.to_thread(
                run, ["doctor", "--json", "--engine-url", f"{engine.url},{away}"], tmp_path
            )
            well = await asyncio.to_thread(
                run, ["doctor", "--json", "--engine-url", f"{engine.url},{engine.url}"], tmp_path
            )
    found = {each["what"]: each["ok"] for each in done.json if each["what"].startswith("engine http")}
    assert found == {f"engine {engine.url}": True, f"engine {away}": False}
    assert (done.code, well.code) == (1, 0)


async def test_doctor_asks_the_servers_behind_a_router(tmp_path: Path) -> None:
    async with (
        scripted_sglang(make_tiny_model(tmp_path / "model"), []) as engine,
        router(WORKER | {"url": engine.url}) as url,
    ):
        done = await asyncio.to_thread(run, ["doctor", "--json", "--engine-url", url], tmp_path)
    found = [each for each in done.json if each["what"].startswith("engine http") and each["fix"] is None]
    assert [(each["what"], each["ok"]) for each in found] == [(f"engine {url}", True), (f"engine {engine.url}", True)]
    assert found[0]["detail"].startswith("router with 1 worker")
    assert done.code == 0
