"""Connections that ask for nothing, or never stop asking: they end, and cost nobody else anything."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar.gateway import plain_http
from polar.gateway.server import GatewayServer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the size of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.5)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def server() -> AsyncIterator[GatewayServer]:
    made = GatewayServer(echo)
    await made.start()
    yield made
    await made.close()


async def opened(server: GatewayServer) -> Streams:
    return await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))


async def status(streams: Streams) -> bytes:
    async with asyncio.timeout(20):
        line = await streams[0].readline()
    return line[9:12]


async def asked(streams: Streams, path: str = "/") -> bytes:
    streams[1].write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi".encode())
    return await status(streams)


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nX: ", b"GET /", b"GET / HTTP/1.1\r\n", b"\r\n"])
async def test_a_head_without_end_is_cut_off(server: GatewayServer, begin: bytes) -> None:
    streams = await opened(server)
    more = b"a: b\r\n" * 1024 if begin.endswith(b"1\r\n") else b"\r\n" * 4096 if begin == b"\r\n" else b"x" * 8192
    streams[1].write(begin)
    sent = 0
    try:
        while sent < 64 << 20 and not streams[0].at_eof():
            streams[1].write(more)
            await streams[1].drain()
            sent += len(more)
    except ConnectionError:
        pass
    assert sent < 64 << 20
    assert await asked(await opened(server)) == b"200"


async def test_trailers_without_end_are_cut_off(server: GatewayServer) -> None:
    streams = await opened(server)
    streams[1].write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n")
    sent = 0
    try:
        while sent < 64 << 20 and not streams[0].at_eof():
            streams[1].write(b"a: b\r\n" * 1024)
            await streams[1].drain()
            sent += 6 * 1024
    except ConnectionError:
        pass
    assert sent < 64 << 20


async def test_a_large_body_is_no_large_head(server: GatewayServer) -> None:
    streams = await opened(server)
    streams[1].write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4194304\r\n\r\n" + b"x" * (4 << 20))
    assert await status(streams) == b"200"
    streams = await opened(server)
    streams[1].write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(64):
        streams[1].write(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        await streams[1].drain()
    streams[1].write(b"0\r\n\r\n")
    assert await status(streams) == b"200"


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nX: "])
async def test_who_never_asks_is_shown_out(
    server: GatewayServer, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_http, "HEAD_SECONDS", 0.2)
    streams = await opened(server)
    streams[1].write(begin)
    async with asyncio.timeout(20):
        said = await streams[0].read()
    assert said[9:12] in (b"408", b"")


async def test_an_answer_that_takes_long_is_not_cut(server: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "HEAD_SECONDS", 0.1)
    streams = await opened(server)
    half = b"GET /next"
    streams[1].write(b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" + half)
    assert await status(streams) == b"200"


async def test_a_connection_is_kept_between_two_calls(server: GatewayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_http, "HEAD_SECONDS", 0.1)
    streams = await opened(server)
    assert await asked(streams) == b"200"
    await streams[0].readuntil(b"\r\n\r\n2")
    await asyncio.sleep(0.3)  # more than a first head may take
    assert await asked(streams) == b"200"


async def test_one_listener_has_so_many_connections_and_another_its_own(server: GatewayServer) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    await server.serve(listener, connections=4)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
    assert [await asked(each) for each in held] == [b"200"] * 4
    assert await status(await asyncio.open_connection("127.0.0.1", port)) == b"503"
    assert await asked(await opened(server)) == b"200"
    held[0][1].close()
    await held[0][1].wait_closed()
    async with asyncio.timeout(20):
        while True:
            streams = await asyncio.open_connection("127.0.0.1", port)
            if await asked(streams) == b"200":
                break
