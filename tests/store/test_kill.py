"""SIGKILL at any moment loses nothing that was told."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable

import pytest

from polar.store import Ledger, open_store
from tests.store import ledger_process, making, writer_process


async def _kill_and_check(url: str, round_: int, writing: Callable) -> None:
    session = f"round-{round_}"
    process = writing(url, session, 3000)
    told = process.read(random.Random(round_).randrange(1, 400))
    told += process.kill()
    assert len(told) < 3000, "it was killed while it wrote"

    store = open_store(url)
    await store.open()
    stored = {c.completion_id: c for c in await store.completions(session)}
    await store.close()
    assert set(told) <= set(stored)
    for completion in stored.values():
        assert making.same(completion, writer_process.written(session, completion.seq))
    _check_file(url)


def _check_file(url: str) -> None:
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def test_a_killed_writer_loses_nothing_it_was_told(store_url: str, writing: Callable) -> None:
    for round_ in range(2):
        await _kill_and_check(store_url, round_, writing)


@pytest.mark.slow
async def test_a_writer_killed_twenty_times_over_one_store_loses_nothing(store_url: str, writing: Callable) -> None:
    for round_ in range(100, 120):
        await _kill_and_check(store_url, round_, writing)


async def _kill_a_ledger_and_check(url: str, round_: int, writing: Callable) -> None:
    process = writing(url, f"round-{round_}", 1000, module="ledger_process")
    told = process.read(random.Random(round_).randrange(1, 300))
    told += process.kill()
    assert len(told) < 1000 * 7, "it was killed while it wrote"
    ledger = open_store(url)
    await ledger.open()
    try:
        await _check_told(ledger, told)
        await _check_whole(ledger)
        await _finish(ledger)
        await _check_whole(ledger)
    finally:
        await ledger.close()
    _check_file(url)


async def _check_told(ledger: Ledger, told: list[str]) -> None:
    facts = [line.split(":") for line in told]
    tasks = {task.task_id for task in await ledger.tasks()}
    attempts = {s.session_id: s.attempt for s in await ledger.sessions()}
    results = {(r.session_id, r.attempt) for r in await ledger.results()}
    assert {names[0] for kind, *names in facts if kind == "submitted"} <= tasks
    assert all(attempts[names[0]] >= int(names[1]) for kind, *names in facts if kind == "claimed")
    assert {(names[0], int(names[1])) for kind, *names in facts if kind == "delivered"} <= results


async def _check_whole(ledger: Ledger) -> None:
    """Nothing is half: a task has all its sessions, an end its result and calls, a task that is over its callback."""
    results = [(r.session_id, r.attempt) for r in await ledger.results()]
    sessions = await ledger.sessions()
    ended = [(s.session_id, s.attempt) for s in sessions if s.state == "COMPLETED"]
    assert sorted(results) == sorted(ended)
    for name, attempt in ended[-20:]:
        assert len(await ledger.completions(name, attempt)) == 2
    progress = await ledger.progress()
    assert {told.sessions for told in progress} == {ledger_process.SAMPLES}
    over = {told.task_id for told in progress if told.ended == told.sessions}
    assert {due.task_id for due in await ledger.callbacks_due(1e9, 100_000)} == over


async def _finish(ledger: Ledger) -> None:
    """The next life of the server takes back what was held, and runs all that is left."""
    await ledger.expire(ledger_process.SECONDS + 1)
    while leases := await ledger.claim("next", 50, 10.0, 20.0):
        for lease in leases:
            await ledger.deliver("next", making.delivery(lease, calls=2, trained=1), 21.0)
    assert {told.status for told in await ledger.progress()} == {"completed"}


async def test_a_killed_ledger_loses_nothing_it_was_told_and_goes_on(store_url: str, writing: Callable) -> None:
    await _kill_a_ledger_and_check(store_url, 7, writing)


@pytest.mark.slow
async def test_a_ledger_killed_ten_times_loses_nothing_and_goes_on(store_url: str, writing: Callable) -> None:
    for round_ in range(300, 310):
        await _kill_a_ledger_and_check(store_url, round_, writing)
