"""From a node's journal to the server over HTTP: in bounded pieces, and past what the server refuses for good."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar.contract.chat import Message
from polar.contract.completion import Completion
from polar.contract.rollout import Delivery
from polar.gateway import coordinator, shipping
from polar.gateway.coordinator import HttpCoordinator, Unreachable
from polar.gateway.shipping import Shipping, batches
from polar.rollout import nodes_api
from polar.store import SessionRecord, SQLiteJournal
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS, completion, result, task

MOST = 100_000
BLOB = {"blob": "x" * 2 * MOST}


class Shipped(HttpCoordinator):
    """The real one, with a list of what it has sent."""

    sent: list[Delivery]

    async def deliver(self, delivery: Delivery) -> None:
        self.sent.append(delivery)
        await super().deliver(delivery)


class Ship:
    """A node of which only the journal is here, and a server that takes bodies of ``MOST`` bytes."""

    def __init__(self, world: World, journal: SQLiteJournal) -> None:
        self.world = world
        self.journal = journal
        self.settled: list[tuple[str, int]] = []
        self.coordinator = Shipped(world.url, "n1", TOKENS["node"])
        self.coordinator.sent = []
        self.shipping = Shipping(journal, self.coordinator, lambda *of: self.settled.append(of))

    async def begin(self, samples: int = 1) -> None:
        """A task whose sessions this node has."""
        await self.world.join()
        await self.world.submit(task(num_samples=samples))
        for lease in await self.world.claim():
            await self.journal.put_session(self.record(lease["session_id"], "RUNNING"))

    async def end(self, session_id: str, calls: list[Completion], **fields: Any) -> None:
        """A session has made its calls, and ended."""
        for call in calls:
            await self.journal.put_completion(call)
        made = result(session_id, **fields)
        made.trajectory.metadata["reconstruction"]["completions"] = {"trained": [c.completion_id for c in calls]}
        await self.journal.finish_session(self.record(session_id, "COMPLETED"), made)

    def record(self, session_id: str, state: Any) -> SessionRecord:
        sample = int(session_id.rpartition("-")[2])
        times = {"created_at": 1.0, "updated_at": 2.0}
        return SessionRecord(session_id=session_id, task_id="t1", sample_index=sample, state=state, **times)


@pytest.fixture
async def ship(make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ship]:
    monkeypatch.setattr(nodes_api, "LARGEST_DELIVERY", MOST)
    journal = SQLiteJournal(tmp_path / "journal.db")
    await journal.open()
    ship = Ship(await make_world(), journal)
    yield ship
    await ship.coordinator.close()
    await journal.close()


def calls(session_id: str, count: int = 2, **fields: Any) -> list[Completion]:
    return [completion(session_id, seq, **fields) for seq in range(count)]


async def test_calls_go_in_batches_of_one_attempt_and_of_so_many_bytes(
    ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipping, "SHIP_BYTES", 50_000)
    await ship.begin(2)
    large = {"blob": "x" * 30_000}
    await ship.end("t1-0", calls("t1-0", 4, metadata=large))
    await ship.end("t1-1", calls("t1-1", 4))
    await ship.shipping.ship()
    sent = [(each.session_id, len(each.completions)) for each in ship.coordinator.sent if each.completions]
    assert sent == [*[("t1-0", 1)] * 4, ("t1-1", 4)]
    assert [r.status for r in await ship.world.ledger.results()] == ["COMPLETED"] * 2
    assert ship.settled == [("t1-0", 1), ("t1-1", 1)]


def test_batches_keep_the_order_and_leave_nothing_out() -> None:
    given = [*calls("t1-0", 5), *calls("t1-0", 2, attempt=2), *calls("t1-1", 3)]
    found = batches(given, 2 * len(coordinator.to_json(given[1])) + 200)
    assert [call for batch in found for call in batch] == given
    assert all(len({(call.session_id, call.attempt) for call in batch}) == 1 for batch in found)
    assert max(len(batch) for batch in found) == 2
    assert [len(batch) for batch in batches(given, 1)] == [1] * 10


async def test_a_call_that_the_server_never_takes_ends_its_session_and_keeps_up_no_other(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    await ship.begin(2)
    first, poisoned, after = calls("t1-0", 3)
    poisoned.metadata = BLOB
    await ship.end("t1-0", [first, poisoned, after])
    await ship.end("t1-1", calls("t1-1"))
    with caplog.at_level(logging.ERROR, "polar.node"):
        await ship.shipping.ship()
        await ship.shipping.ship()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "session t1-0 attempt 1" in line
    assert poisoned.completion_id in line
    assert after.completion_id in line, "it builds on the one before"
    assert "413" in line

    bad, good = (await ship.world.get("/rollout/task/t1"))["results"]
    assert (bad["status"], good["status"]) == ("ERROR", "COMPLETED")
    assert f"the rollout server refused calls that its node has captured ({poisoned.completion_id}, " in bad["error"]
    assert "413" in bad["error"]
    kept = (await ship.world.get("/sessions/t1-0/completions"))["completions"]
    assert [each["completion_id"] for each in kept] == [first.completion_id]
    (told, _) = await ship.world.ledger.results()
    refused = [poisoned.completion_id, after.completion_id]
    fates = told.trajectory.metadata["reconstruction"]["completions"]
    assert fates == {"trained": [first.completion_id], "refused": refused}
    assert list(await ship.journal.refused("t1-0", 1)) == refused
    assert len(await ship.journal.completions("t1-0")) == 3


async def test_what_builds_on_a_refused_call_is_refused_also_when_it_is_made_later(ship: Ship) -> None:
    await ship.begin()
    first, after = calls("t1-0")
    first.metadata = BLOB
    await ship.journal.put_completion(first)
    await ship.shipping.ship()
    await ship.end("t1-0", [after])
    await ship.shipping.ship()
    assert list(await ship.journal.refused("t1-0", 1)) == [first.completion_id, after.completion_id]
    assert await ship.world.ledger.completions("t1-0") == []
    assert [r.status for r in await ship.world.ledger.results()] == ["ERROR"]


async def test_a_result_that_the_server_never_takes_ends_as_an_error_that_says_so(
    ship: Ship, caplog: pytest.LogCaptureFixture
) -> None:
    await ship.begin(2)
    made = calls("t1-0")
    await ship.end("t1-0", made, metadata=BLOB)
    await ship.end("t1-1", calls("t1-1"))
    with caplog.at_level(logging.ERROR, "polar.node"):
        await ship.shipping.ship()
        await ship.shipping.ship()
    assert len(caplog.records) == 1
    bad, good = await ship.world.ledger.results()
    assert (bad.status, good.status) == ("ERROR", "COMPLETED")
    assert bad.error is not None
    assert bad.error.startswith("the rollout server refused its result, which is in the journal of its node")
    fates = bad.trajectory.metadata["reconstruction"]["completions"]
    assert fates == {"not_built": [call.completion_id for call in made]}
    (shown, _) = (await ship.world.get("/rollout/task/t1"))["results"]
    assert (shown["status"], len(shown["trajectory"]["traces"])) == ("ERROR", 1)
    kept = await ship.journal.result("t1-0", 1)
    assert kept is not None
    assert kept.metadata == BLOB
    assert await ship.journal.undelivered() == []


async def test_a_result_that_comes_too_late_is_no_error_of_its_session(ship: Ship) -> None:
    await ship.begin()
    await ship.world.node("/nodes/n1/release", {"session_id": "t1-0", "attempt": 1})
    await ship.end("t1-0", calls("t1-0"))
    await ship.shipping.ship()
    record = await ship.world.ledger.session("t1-0")
    assert record is not None
    assert (record.state, record.attempt) == ("REGISTERED", 2)
    assert len(await ship.world.ledger.completions("t1-0", 1)) == 2, "its calls are history"
    assert await ship.journal.undelivered() == []


async def test_a_body_larger_than_any_server_takes_is_not_even_sent(
    ship: Ship, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "LARGEST_DELIVERY", MOST)
    await ship.begin()
    await ship.end("t1-0", calls("t1-0", 1, metadata=BLOB))
    await ship.shipping.ship()
    (told,) = await ship.world.ledger.results()
    assert told.error is not None
    assert f"more than a rollout server takes ({MOST})" in told.error


async def test_at_an_address_without_a_rollout_server_nothing_is_refused_for_good(ship: Ship) -> None:
    await ship.begin()
    await ship.end("t1-0", calls("t1-0"))
    elsewhere = HttpCoordinator(f"{ship.world.url}/elsewhere", "n1", TOKENS["node"])
    with pytest.raises(Unreachable):
        await Shipping(ship.journal, elsewhere, lambda *_: None).ship()
    await elsewhere.close()
    assert len(await ship.journal.unshipped(10)) == 2
    await ship.shipping.ship()
    assert [r.status for r in await ship.world.ledger.results()] == ["COMPLETED"]


@pytest.mark.parametrize(
    ("status", "body"),
    [(413, "<html><h1>Request Entity Too Large</h1></html>"), (400, "[]"), (409, '{"error": 1}')],
)
async def test_what_a_proxy_refuses_is_not_refused_for_good(ship: Ship, status: int, body: str) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, text=body)

    app = web.Application()
    app.router.add_post("/{path:.*}", refuse)
    await ship.begin()
    await ship.end("t1-0", calls("t1-0"))
    async with TestServer(app) as proxy:
        between = HttpCoordinator(str(proxy.make_url("")), "n1", TOKENS["node"])
        with pytest.raises(Unreachable, match=f"answered {status}: .*a proxy"):
            await Shipping(ship.journal, between, lambda *_: None).ship()
        await between.close()
    assert await ship.journal.refused("t1-0", 1) == {}
    await ship.shipping.ship()
    assert [r.status for r in await ship.world.ledger.results()] == ["COMPLETED"]


async def test_text_with_half_a_character_arrives(ship: Ship) -> None:
    await ship.begin()
    await ship.end("t1-0", calls("t1-0", 1, messages=(Message("user", "cut \ud83d here"),)))
    await ship.shipping.ship()
    (call,) = await ship.world.ledger.completions("t1-0")
    assert call.messages[0].content == "cut \ufffd here"
    assert [r.status for r in await ship.world.ledger.results()] == ["COMPLETED"]
