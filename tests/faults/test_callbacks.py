"""A trainer's end of a callback that breaks in every way: one effect, under one delivery id, also when the server is
killed in between."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from tests.cli.making import ScriptedProcess
from tests.faults.fleet import Fleet, check_all, until

pytestmark = pytest.mark.slow

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FAULTS = ("fails", "is cut in the body", "dies in the answer", "hangs", "hangs")
"""How the first tries go, one after the other; the server is killed in the first that hangs."""


class Trainer:
    """Keeps the body of each delivery id, as a trainer does that must not count a result twice."""

    def __init__(self, then: bytes, pause: float) -> None:
        self.ids: list[str] = []
        self.effects: dict[str, list[bytes]] = {}
        self.port = 0
        self._then = then
        self._pause = pause

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Trainer]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
            name, length = headers["webhook-id"], int(headers["content-length"])
            number = len(self.ids)
            self.ids.append(name)
            how = FAULTS[number] if number < len(FAULTS) else "answers"
            if how == "is cut in the body":
                await reader.readexactly(length // 2)
                writer.transport.abort()
                return
            self.effects.setdefault(name, []).append(await reader.readexactly(length))
            if how == "fails":
                writer.write(b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n")
            elif how == "dies in the answer":
                writer.write(OK[:10])
                await writer.drain()
                writer.transport.abort()
                return
            elif how == "hangs":
                await reader.read()
            else:
                for start in range(0, len(self._then), 16):
                    writer.write(self._then[start : start + 16])
                    await asyncio.sleep(self._pause)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


@pytest.mark.parametrize(("then", "pause"), [(OK, 0.2), (OK + OK, 0.0)], ids=["slowly", "twice"])
async def test_one_effect_whatever_the_receiver_does(
    engine: ScriptedProcess, tmp_path: Path, then: bytes, pause: float
):
    patience = {"timeout_seconds": 2.0, "backoff_seconds": 0.1, "longest_backoff_seconds": 0.5}
    with Fleet(tmp_path, engine, server={"callbacks": patience}) as fleet:
        async with Trainer(then, pause).listening() as trainer, fleet.client() as client:
            url = f"http://127.0.0.1:{trainer.port}/done"
            await client.submit(fleet.a_task("t", samples=3, turns=2, callback_url=url))
            await until(lambda: len(trainer.ids) == FAULTS.index("hangs") + 1, "the first try that hangs")
            fleet.server.kill()
            fleet.server.start()
            await until(lambda: len(trainer.ids) == len(FAULTS) + 1, "the try that is answered")
            status = await check_all(fleet, client, "t", 3)
            # Once it has arrived nothing is owed any more, not even over a restart.
            await until(lambda: not _owed(fleet), "nothing is owed")
            fleet.server.stop()
            fleet.server.start()
            fleet.server.wait()
            await client.submit(fleet.a_task("next", samples=1, turns=1, callback_url=url))
            await until(lambda: len(set(trainer.ids)) == 2, "the next task's callback")
            fleet.stop()
    (first, times), (_, once) = Counter(trainer.ids).most_common()
    assert (times, once) == (len(FAULTS) + 1, 1)
    for body in trainer.effects[first]:
        told = json.loads(body)
        assert told["delivery_id"] == first
        assert sorted(each["session_id"] for each in told["results"]) == sorted(
            each.session_id for each in status.results
        )


def _owed(fleet: Fleet) -> bool:
    with closing(sqlite3.connect(f"file:{fleet.server.data}/polar.db?mode=ro", uri=True)) as db:
        return bool(db.execute("SELECT count(*) FROM callbacks WHERE retry_at IS NOT NULL").fetchone()[0])
