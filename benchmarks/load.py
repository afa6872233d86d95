"""The clients: each sends a call, waits for the answer, sends the next. Raw HTTP over kept-alive connections,
so that the load takes little of the machine from what is measured."""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from benchmarks.conversation import PLACE, Conversation


@dataclass(frozen=True)
class Client:
    """A session as its harness sees it: where it stands in its conversation."""

    key: str
    name: str
    place: str
    conversation: Conversation
    call: int


class Connection(asyncio.Protocol):
    """One kept-alive connection; one call at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport
        self._answer: asyncio.Future[None]
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower() + b"\r\n"
        start = head.index(b"\r\ncontent-length:") + 17
        length = int(head[start : head.index(b"\r\n", start)])
        if len(self._received) < end + 4 + length:
            return
        if head.startswith(b"http/1.1 200"):
            self._answer.set_result(None)
        else:
            self._answer.set_exception(RuntimeError(self._received[:400].decode(errors="replace")))
        self._received.clear()

    async def send(self, request: bytes) -> float:
        """Seconds from the first byte out to the last byte in."""
        self._answer = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        self._transport.write(request)
        await self._answer
        return time.perf_counter() - begin

    def close(self) -> None:
        """Hang up."""
        self._transport.abort()


async def drive(port: int, clients: Sequence[Client], *, in_flight: int, calls: int, skip: int = 0) -> list[float]:
    """Each client's ``calls`` calls after its first ``skip``; ``in_flight`` of the clients at a time.

    Returns:
        Seconds of each call.
    """
    bodies = {
        (client.conversation.name, client.call + turn): client.conversation.body(client.call + turn)
        for client in clients
        for turn in range(skip, skip + calls)
    }
    waiting = iter(clients)
    seconds: list[float] = []

    async def lane() -> None:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        for client in waiting:
            for turn in range(skip, skip + calls):
                body = bodies[client.conversation.name, client.call + turn]
                seconds.append(await connection.send(_request(client, body)))
        connection.close()

    await asyncio.gather(*(lane() for _ in range(in_flight)))
    return seconds


def free_port() -> int:
    """A port of the loopback that nobody has just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def p50_ms(seconds: Sequence[float]) -> float:
    """Their median in milliseconds."""
    return statistics.median(seconds) * 1000


def _request(client: Client, body: bytes) -> bytes:
    body = body.replace(PLACE.encode(), client.place.encode())
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: bench\r\naccept: */*\r\n"
        b"content-type: application/json\r\nauthorization: Bearer %s\r\nx-session-id: %s\r\n"
        b"content-length: %d\r\n\r\n%s"
    ) % (client.key.encode(), client.name.encode(), len(body), body)
