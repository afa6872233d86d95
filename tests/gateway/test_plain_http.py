"""Clients that offer another protocol: served as plain HTTP/1.1, body and all."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.gateway.conftest import World
from tests.support.script import Step

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
OFFERS = {
    "h2c": H2C,
    "with_keep_alive": "Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n",
    "websocket": "Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "none": "",
}


def request(world: World, offer: str, *, chunked: bool = False) -> bytes:
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(BODY)}"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {world.session.key}\r\n"
    return f"{head}{offer}{length}\r\n\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, dict]:
    async with asyncio.timeout(10):
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
        return head.split(b"\r\n")[0], json.loads(await reader.readexactly(int(fields[b"content-length"])))


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("offer", OFFERS)
async def test_a_post_with_an_offer_keeps_its_body_and_its_connection(make_world, offer, chunked) -> None:
    """Java's HttpClient sends every first request so."""
    world: World = await make_world(lambda _: Step(text="Fine."))
    host, _, port = world.node.server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(2):
        writer.write(request(world, OFFERS[offer], chunked=chunked))
        status, reply = await answer(reader)
        assert status == b"HTTP/1.1 200 OK"
        assert reply["choices"][0]["message"]["content"] == "Fine."
    writer.close()


async def test_a_head_that_comes_in_pieces_and_requests_that_come_together(make_world) -> None:
    world: World = await make_world(lambda _: Step(text="Fine."))
    host, _, port = world.node.server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = request(world, H2C)
    for start in range(0, len(data), 50):
        writer.write(data[start : start + 50])
        await writer.drain()
    assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
    writer.write(request(world, "") + request(world, H2C))
    for _ in range(2):
        assert (await answer(reader))[0] == b"HTTP/1.1 200 OK"
    writer.close()


@pytest.mark.parametrize("data", [b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00\x01\x02\r\n\r\n"])
async def test_what_is_no_request_of_ours_is_refused_and_the_connection_closed(make_world, data) -> None:
    world: World = await make_world([])
    host, _, port = world.node.server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(10):
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
