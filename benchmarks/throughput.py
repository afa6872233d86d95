"""``python -m benchmarks.throughput --engine vllm --engine-url URL``: what is left of an engine's throughput when
every call goes through Polar. Conversations of a few turns are held at the same time: straight with the engine,
straight and asking for what a trainer needs (logprobs and token ids), and through ``polar serve``, in turn, so that
all see the same machine. The clients are processes of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.load import free_port

TOKEN = "admin-token-of-the-benchmark"
NODE_TOKEN = "node-token-of-the-benchmark"
START_SECONDS = 120.0
_POLAR = [sys.executable, "-c", "from polar.cli import main; main()", "serve"]
_WORDS = "Tell me, in many words, what number {} and everything around it stands for, and why. "


@dataclass(frozen=True)
class Load:
    """What the clients do: so many conversations of ``turns`` calls, each answered with ``tokens`` tokens."""

    model: str
    turns: int
    tokens: int
    words: int
    stream: bool
    recorded: bool = False
    """Ask for logprobs and token ids, as Polar does."""


def main() -> None:
    """Measure, and print a row for each number in flight."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--engine", default="vllm", choices=["vllm", "sglang", "openai"])
    parser.add_argument("--engine-url")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="gateway processes behind the port")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="sampled in each turn")
    parser.add_argument("--words", type=int, default=4, help="length of what a user says, in sentences")
    parser.add_argument("--clients", type=int, default=4, help="processes that make the calls")
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    said = parser.parse_args()
    if said.drive:
        print(json.dumps(asyncio.run(_drive(json.loads(said.drive)))))
    else:
        asyncio.run(_measure(said))


async def _measure(said: argparse.Namespace) -> None:
    model = await _served(said.engine_url)
    print(f"{model}, {said.turns} turns of {said.tokens} tokens; {os.cpu_count()} cores; output tokens/s", flush=True)
    for workers in said.workers:
        async with _polar(said.engine, said.engine_url, workers) as url:
            for stream in (True, False):
                load = Load(model, said.turns, said.tokens, said.words, stream)
                for in_flight in said.in_flight:
                    await _row(said, url, load, in_flight, workers)


async def _row(said: argparse.Namespace, url: str, load: Load, in_flight: int, workers: int) -> None:
    engine = [(f"{said.engine_url}/v1", "none")] * in_flight
    plain, recorded, through = [], [], []
    for _ in range(said.rounds):
        plain.append(await _round(engine, load, said.clients))
        recorded.append(await _round(engine, replace(load, recorded=True), said.clients))
        sessions = await asyncio.gather(*(_opened(url) for _ in range(in_flight)))
        through.append(await _round(sessions, load, said.clients))
    print(
        f"{'streamed' if load.stream else 'whole':8} {workers} worker(s) {in_flight:4} in flight: "
        f"straight {_figures(plain)}; with logprobs and ids {_figures(recorded)}; through Polar {_figures(through)}: "
        f"{sum(through) / sum(plain):.2f} and {sum(through) / sum(recorded):.2f} of them",
        flush=True,
    )


def _figures(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:,.0f}" for rate in rates)


# ---- the clients -----------------------------------------------------------------------------------------


async def _round(places: Sequence[tuple[str, str]], load: Load, clients: int) -> float:
    """Tokens per second of one conversation for each base URL and key, all at the same time."""
    parts = [places[number::clients] for number in range(clients) if places[number::clients]]
    begin = time.time() + 2.0  # when all of them have started
    processes = []
    for part in parts:
        plan = json.dumps({"places": part, "load": load.__dict__, "begin": begin})
        command = [sys.executable, "-m", "benchmarks.throughput", "--drive", plan]
        processes.append(await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE))
    told = [json.loads((await process.communicate())[0] or b"null") for process in processes]
    if not all(told):
        raise RuntimeError("a client failed: see above")
    return float(sum(each["tokens"] for each in told) / (max(each["end"] for each in told) - begin))


async def _drive(plan: dict[str, Any]) -> dict[str, float]:
    load = Load(**plan["load"])
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.sleep(max(0.0, plan["begin"] - time.time()))
        talks = (_talk(session, url, key, load, number) for number, (url, key) in enumerate(plan["places"]))
        tokens = sum(await asyncio.gather(*talks))
    return {"tokens": tokens, "end": time.time()}


async def _talk(session: aiohttp.ClientSession, url: str, key: str, load: Load, number: int) -> int:
    messages: list[dict[str, str]] = []
    tokens = 0
    for turn in range(load.turns):
        messages.append({"role": "user", "content": _WORDS.format(number * 1000 + turn) * load.words})
        body: dict[str, Any] = {"model": load.model, "messages": messages, "max_tokens": load.tokens}
        if load.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if load.recorded:
            body |= {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {(await reply.text())[:400]}")
            text, sampled = await (_streamed(reply) if load.stream else _whole(reply))
        tokens += sampled
        messages.append({"role": "assistant", "content": text})
    return tokens


async def _whole(reply: aiohttp.ClientResponse) -> tuple[str, int]:
    told = await reply.json()
    return told["choices"][0]["message"]["content"] or "", told["usage"]["completion_tokens"]


async def _streamed(reply: aiohttp.ClientResponse) -> tuple[str, int]:
    parts, tokens = [], 0
    async for line in reply.content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            parts.append(choice["delta"].get("content") or "")
    return "".join(parts), tokens


# ---- the servers -----------------------------------------------------------------------------------------


async def _served(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as reply:
        name: str = (await reply.json())["data"][0]["id"]
        return name


@asynccontextmanager
async def _polar(engine: str, engine_url: str, workers: int) -> AsyncIterator[str]:
    """The address of a rollout server that has a gateway of so many workers."""
    server, gateway = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    env = {**os.environ, "POLAR_ADMIN_TOKEN": TOKEN, "POLAR_NODE_TOKEN": NODE_TOKEN, "POLAR_LOG": "WARNING"}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        with Path(folder, "log.txt").open("w") as log:
            at = ["--port", server.rpartition(":")[2], "--out", f"{folder}/server"]
            first = subprocess.Popen([*_POLAR, "--role", "rollout", *at], env=env, stderr=log)
            at = ["--port", gateway.rpartition(":")[2], "--out", f"{folder}/gateway", "--workers", str(workers)]
            to = ["--server", server, "--engine", engine, "--engine-url", engine_url, "--no-sandbox"]
            second = subprocess.Popen([*_POLAR, "--role", "gateway", *at, *to], env=env, stderr=log)
        try:
            async with asyncio.timeout(START_SECONDS):
                while not await _answers(gateway):
                    if first.poll() is not None or second.poll() is not None:
                        raise RuntimeError(Path(folder, "log.txt").read_text())
                    await asyncio.sleep(0.2)
            yield server
        finally:
            for process in (second, first):
                process.terminate()
            for process in (second, first):
                await asyncio.to_thread(process.wait)


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False


async def _opened(url: str) -> tuple[str, str]:
    """Base URL and key of a bare session."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/sessions", json={}, headers=headers) as reply:
        if reply.status not in (200, 201):
            raise RuntimeError(f"{reply.status}: {await reply.text()}")
        told = await reply.json()
        return told["base_urls"]["openai"], told["api_key"]


if __name__ == "__main__":
    main()
