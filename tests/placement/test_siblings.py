"""Two gateway workers on one port: whatever worker a connection reaches, a request is served by the one it is for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.gateway.server import GatewayServer
from polar.gateway.session import new_key
from polar.gateway.siblings import Place, Siblings

PIECE = b"x" * 4096


@dataclass
class Worker:
    """Tells what it was asked, and answers as the path says."""

    index: int
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        entry = {
            "path": scope["path"],
            "query": scope["query_string"],
            "headers": dict(scope["headers"]),
            "body": b"",
        }
        self.asked.append(entry)
        if scope["path"] == "/refused":
            await self._reply(send, 413, b"too much")
            return
        more = True
        while more:
            message = await receive()
            entry["body"] += message.get("body", b"")
            more = message.get("more_body", False)
        if scope["path"] in ("/stream", "/cut"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-worker", b"%d" % self.index)]})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            leaving = asyncio.create_task(self._until_gone(receive))
            going = asyncio.create_task(self.go_on.wait())
            await asyncio.wait({leaving, going}, return_when=asyncio.FIRST_COMPLETED)
            if scope["path"] == "/cut":
                raise ConnectionAbortedError
            await send({"type": "http.response.body", "body": b"last", "more_body": False})
            return
        await self._reply(send, 200, str(self.index).encode())

    async def _until_gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            continue
        self.gone.set()

    async def _reply(self, send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode()), (b"x-name", "Zoë".encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass
class Pair:
    """Both workers, and the address at which the first one is reached."""

    workers: list[Worker]
    url: str
    client: aiohttp.ClientSession


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with contextlib.AsyncExitStack() as stack:
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
        ports = tuple(own.getsockname()[1] for own in sockets[2:])
        workers = [Worker(0), Worker(1)]
        for index, worker in enumerate(workers):
            place = Place(index, sockets[index], sockets[2 + index], ports, "")
            siblings = Siblings(worker, place)
            stack.push_async_callback(siblings.close)
            for app, listener in ((siblings, place.shared), (worker, place.own)):
                server = GatewayServer(app)
                await server.serve(listener)
                stack.push_async_callback(server.close)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield Pair(workers, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", client)


WAYS: list[Callable[[str], tuple[str, dict[str, str]]]] = [
    lambda key: ("/v1/x", {"Authorization": f"Bearer {key}"}),
    lambda key: ("/v1/x", {"x-api-key": key}),
    lambda key: ("/v1/x", {"x-goog-api-key": key}),
    lambda key: (f"/v1/x?key={key}", {}),
    lambda key: (f"/s/{key}/v1/x", {}),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", [0, 1])
async def test_a_key_is_served_by_its_own_worker(pair: Pair, way: Any, index: int):
    path, headers = way(new_key(index))
    async with pair.client.post(pair.url + path, data=b"{}", headers=headers) as reply:
        assert (reply.status, await reply.read()) == (200, str(index).encode())
        assert reply.headers["x-name"] == "Zoë"
    assert [len(worker.asked) for worker in pair.workers] == [1 - index, index]


async def test_the_path_names_a_worker_and_does_not_reach_it(pair: Pair):
    for index in (0, 1):
        url = f"{pair.url}/workers/{index}/sessions/a%2Fb?wait=1&q=%20"
        async with pair.client.post(url, json={"a": 1}, headers={"X-Own": "ü"}) as reply:
            assert await reply.read() == str(index).encode()
        (asked,) = pair.workers[index].asked
        assert asked["path"] == "/sessions/a/b"
        assert asked["query"] == b"wait=1&q=%20"
        assert asked["body"] == b'{"a": 1}'
        assert asked["headers"][b"content-type"] == b"application/json"
        assert asked["headers"][b"x-own"] == "ü".encode()


@pytest.mark.parametrize("path", ["/health", "/workers/7/health", "/workers/x/health", "/s/none/v1"])
async def test_what_is_no_siblings_is_served_here(pair: Pair, path: str):
    async with pair.client.get(pair.url + path, headers={"Authorization": "Bearer sk-other"}) as reply:
        assert await reply.read() == b"0"


async def test_a_large_body_is_passed_on_whole(pair: Pair):
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(512):
            yield PIECE

    async with pair.client.post(pair.url + "/workers/1/x", data=pieces()) as reply:
        assert await reply.read() == b"1"
    assert pair.workers[1].asked[0]["body"] == PIECE * 512


async def test_an_answer_before_the_end_of_the_body_comes_through(pair: Pair):
    async with pair.client.post(pair.url + "/workers/1/refused", data=PIECE) as reply:
        assert (reply.status, await reply.read()) == (413, b"too much")


async def test_a_stream_comes_as_it_is_sent(pair: Pair):
    async with pair.client.post(pair.url + "/workers/1/stream", data=b"{}") as reply:
        assert reply.headers["x-worker"] == "1"
        assert await reply.content.readany() == b"first"
        pair.workers[1].go_on.set()
        assert await reply.content.read() == b"last"


async def test_a_stream_that_is_cut_is_cut_here(pair: Pair):
    pair.workers[1].go_on.set()
    with pytest.raises(aiohttp.ClientPayloadError):
        async with pair.client.post(pair.url + "/workers/1/cut", data=b"{}") as reply:
            await reply.read()


async def test_a_client_that_goes_away_goes_away_there(pair: Pair):
    async with pair.client.post(pair.url + "/workers/1/stream", data=b"{}") as reply:
        assert await reply.content.readany() == b"first"
        reply.close()
    async with asyncio.timeout(10):
        await pair.workers[1].gone.wait()


async def test_a_sibling_that_is_away_is_a_503_that_may_be_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = free.getsockname()[1]
    listener = socket.create_server(("127.0.0.1", 0))
    siblings = Siblings(Worker(0), Place(0, listener, listener, (0, nobody), ""))
    server = GatewayServer(siblings)
    await server.serve(listener)
    try:
        async with aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/workers/1/x"
            async with client.post(url, data=b"{}") as reply:
                assert reply.status == 503
                assert "try again" in (await reply.json())["error"]["message"]
    finally:
        await server.close()
        await siblings.close()


@given(st.integers(0, 9999))
def test_keys_say_their_worker_and_stay_random(index: int):
    key, other = new_key(index), new_key(index)
    assert key.startswith(f"sk-polar-{index}.")
    assert key != other
    assert "." not in new_key()
