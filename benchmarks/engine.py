"""An engine that costs nothing: it answers each chat call at once with bytes that were made before.

The session header says which conversation this is and at which call it stands (``agent.49.NAME``: the first
call seen under that name is call 49, the next 50, ...).
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop

from benchmarks.conversation import CONVERSATIONS, reply_body

MODELS = b'{"object":"list","data":[{"id":"bench","owned_by":"vllm","max_model_len":262144}]}'
VERSION = b'{"version":"0.11.0"}'


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class InstantEngine(asyncio.Protocol):
    """One connection. ``replies`` are whole responses by conversation and call."""

    def __init__(self, replies: dict[tuple[str, int], bytes], calls: dict[bytes, int]) -> None:
        self._replies = replies
        self._calls = calls
        self._head = b""
        self._answer = b""
        self._missing = 0
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        if self._missing:
            self._missing -= len(data)
        else:
            self._head += data
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head = b""
            self._missing = self._begin(head) - len(rest)
        if not self._missing:
            self._transport.write(self._answer)

    def _begin(self, head: bytes) -> int:
        """Choose the answer; how many bytes of a body follow."""
        lower = head.lower()
        if lower.startswith(b"get "):
            self._answer = _response(MODELS if b"/models" in lower[:20] else VERSION)
            return 0
        name = _header(lower, b"x-session-id")
        kind, first, _ = name.split(b".", 2)
        call = self._calls.get(name, int(first))
        self._calls[name] = call + 1
        self._answer = self._replies[kind.decode(), call]
        return int(_header(lower, b"content-length"))


def _header(lower_head: bytes, name: bytes) -> bytes:
    start = lower_head.index(b"\r\n" + name + b":") + len(name) + 3
    return lower_head[start:].split(b"\r\n", 1)[0].strip()


async def _main(ranges: list[str]) -> None:
    replies = {}
    for text in ranges:
        name, first, last = text.split(":")
        for call in range(int(first), int(last)):
            replies[name, call] = _response(reply_body(CONVERSATIONS[name], call))
    calls: dict[bytes, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: InstantEngine(replies, calls), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1:]))
