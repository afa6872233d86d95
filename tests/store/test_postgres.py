"""PostgreSQL: what it says when it can't be had, several servers over one database, and one that is killed."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from polar.contract.errors import MissingExtra, UsageError
from polar.store import Ledger, StoreConflict, StoreFailure, open_store, postgres
from polar.store.schema import STEPS
from tests.store import making
from tests.store.postgres_server import PASSWORD, Server


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[tuple[Ledger, Ledger]]:
    """Two servers over one database."""
    stores = open_store(postgres_url), open_store(postgres_url)
    await asyncio.gather(*(store.open() for store in stores))
    yield stores
    await asyncio.gather(*(store.close() for store in stores))


@pytest.fixture
def mortal() -> Iterator[Server]:
    """A server to be killed, which syncs as in real use."""
    server = Server(durable=True)
    try:
        server.start()
        yield server
    finally:
        server.remove()


# Opening


async def _refused(url: str, match: str, *, read_only: bool = False) -> None:
    store = open_store(url, read_only=read_only)
    with pytest.raises(UsageError, match=match) as caught:
        await store.open()
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)
    await store.close()


async def test_a_user_with_a_password_has_a_store_which_can_be_read_elsewhere(
    postgres_url: str, postgres_server: Server
) -> None:
    await _refused(postgres_url, "no Polar store", read_only=True)
    store = open_store(postgres_server.url(password=PASSWORD))
    await store.open()
    await store.put_session(making.session())
    reader = open_store(postgres_url, read_only=True)
    await reader.open()
    assert await reader.sessions() == [making.session()]
    with pytest.raises(UsageError, match="opened for reading only"):
        await reader.put_session(making.session())
    for each in (reader, store):
        await each.close()
        await each.close()
        with pytest.raises(StoreFailure, match="not open"):
            await each.sessions()


async def test_what_can_not_be_had_is_one_line_that_says_what_to_do(
    postgres_url: str, postgres_server: Server
) -> None:
    await _refused("postgresql://polar:secret@127.0.0.1:1/polar", "does not answer .*: start PostgreSQL")
    await _refused(postgres_server.url(password="wrong"), "check user and password")
    await _refused(postgres_server.url("nowhere"), '"nowhere" does not exist: create it')
    await _refused(postgres_server.url(user="nobody"), '"nobody" does not exist: create it')
    postgres_server.execute("DROP USER IF EXISTS guest", "CREATE USER guest")
    await _refused(postgres_server.url(user="guest"), "GRANT CREATE ON DATABASE")


async def test_a_database_of_a_newer_polar_is_refused(postgres_url: str, postgres_server: Server) -> None:
    store = open_store(postgres_url)
    await store.open()
    await store.close()
    postgres_server.execute(f"UPDATE polar.version SET version = {len(STEPS) + 1}")
    await _refused(postgres_url, f"newer Polar: it has version {len(STEPS) + 1}")
    postgres_server.execute("UPDATE polar.version SET version = 1")
    await _refused(postgres_url, "has version 1 .* needs version", read_only=True)


async def test_a_database_of_version_3_is_taken_over(postgres_url: str, postgres_server: Server) -> None:
    store = open_store(postgres_url)
    await store.open()
    await store.put_session(making.session())
    await store.close()
    postgres_server.execute("DROP TABLE polar.forgotten", "UPDATE polar.version SET version = 3")
    await _refused(postgres_url, "has version 3 .* needs version", read_only=True)
    store = open_store(postgres_url)
    await store.open()
    assert await store.sessions() == [making.session()]
    await store.forget_there_later("s", "n")
    assert (await store.sessions(), await store.to_forget()) == ([], [("s", "n")])
    await store.close()


async def test_the_schema_of_another_program_is_left_alone(postgres_url: str, postgres_server: Server) -> None:
    postgres_server.execute("CREATE SCHEMA polar", "CREATE TABLE polar.tasks (theirs int)")
    await _refused(postgres_url, "no Polar store")


async def test_commits_are_synced_even_where_the_users_default_is_not_to(
    postgres_url: str, postgres_server: Server
) -> None:
    postgres_server.execute("ALTER ROLE polar SET synchronous_commit = off")
    try:
        store = open_store(postgres_url)
        await store.open()
        setting = await store._write(lambda db: db.execute("SHOW synchronous_commit").fetchone())  # type: ignore[attr-defined]
        await store.close()
    finally:
        postgres_server.execute("ALTER ROLE polar RESET synchronous_commit")
    assert setting == ("on",)


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MissingExtra, match=r"polar\[postgres\]"):
        open_store("postgresql://db/polar")


def test_a_file_needs_no_driver() -> None:
    code = "import sys; import polar.store; sys.exit('psycopg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Several servers


async def test_no_session_is_given_to_two_nodes_of_two_servers(pair: tuple[Ledger, Ledger]) -> None:
    await pair[0].submit(making.task(num_samples=60), 0.0)

    async def work(store: Ledger, node: str) -> list[tuple[str, int]]:
        got: list[tuple[str, int]] = []
        while leases := await store.claim(node, 2, 10.0, 0.0):
            got += [(lease.session_id, lease.attempt) for lease in leases]
            await store.deliver(node, making.delivery(leases[0], calls=1), 1.0)
        return got

    nodes = [(store, f"{name}{i}") for store, name in zip(pair, "ab", strict=True) for i in range(4)]
    given = await asyncio.gather(*(work(store, node) for store, node in nodes))
    everything = [each for got in given for each in got]
    assert sorted(everything) == sorted((f"task-{i}", 1) for i in range(60))
    assert min(sum(map(len, given[:4])), sum(map(len, given[4:]))) > 0
    lapsed = await asyncio.gather(*(store.expire(10.0) for store in pair))
    delivered = sum((len(got) + 1) // 2 for got in given)
    assert sum(map(len, lapsed)) == 60 - delivered


async def test_two_servers_agree_on_one_body_and_one_result(pair: tuple[Ledger, Ledger]) -> None:
    tasks = [making.task(f"t{i}", num_samples=1) for i in range(20)]
    new = await asyncio.gather(*(store.submit(task, 0.0) for task in tasks for store in pair))
    assert [sum(new[i : i + 2]) for i in range(0, 40, 2)] == [1] * 20
    leases = await pair[0].claim("n", 20, 10.0, 0.0)
    differing = [
        store.deliver("n", making.delivery(lease, trained=i), 1.0) for lease in leases for i, store in enumerate(pair)
    ]
    outcomes = await asyncio.gather(*differing, return_exceptions=True)
    assert [type(o) for o in outcomes].count(StoreConflict) == 20
    assert len(await pair[1].results()) == 20


async def test_a_reader_that_follows_the_cursor_misses_nothing_of_several_writers(
    pair: tuple[Ledger, Ledger],
) -> None:
    await pair[0].submit(making.task(num_samples=120), 0.0)
    leases = await pair[0].claim("n", 120, 10.0, 0.0)
    seen: list[str] = []
    writing = asyncio.gather(
        *(pair[i % 2].deliver("n", making.delivery(lease, calls=i % 3), 1.0) for i, lease in enumerate(leases))
    )
    cursor = 0
    while len(seen) < 120:
        done = writing.done()
        found = await pair[1].results_after(cursor, 7)
        seen += [stored.result.session_id for stored in found]
        cursor = found[-1].cursor if found else cursor
        assert found or not done, "all is written, and some of it was not seen"
    await writing
    assert sorted(seen) == sorted(lease.session_id for lease in leases)
    ids = [event.id for event in await pair[0].events_after(0)]
    assert ids == sorted(set(ids))


async def test_a_cursor_is_given_out_only_when_all_before_it_are_committed(
    pair: tuple[Ledger, Ledger], postgres_server: Server
) -> None:
    # One server is held up in the middle of its group; the other must not overtake it.
    await pair[0].submit(making.task(num_samples=2), 0.0)
    slow, fast = await pair[0].claim("n", 2, 10.0, 0.0)
    inside, go_on = threading.Event(), threading.Event()

    def wait(db: Any) -> None:
        db.execute("INSERT INTO events (body) VALUES ('')")
        inside.set()
        go_on.wait(30)

    held = asyncio.gather(
        pair[0].deliver("n", making.delivery(slow), 1.0),
        pair[0]._write(wait),  # type: ignore[attr-defined]
    )
    assert await asyncio.to_thread(inside.wait, 30)
    overtaking = asyncio.ensure_future(pair[1].deliver("n", making.delivery(fast), 1.0))
    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'polar.writing'::regclass"
    async with asyncio.timeout(30):
        while await asyncio.to_thread(postgres_server.execute, waits) != [(1,)]:
            await asyncio.sleep(0.01)
    assert await pair[1].results_after(0, 10) == []
    assert not overtaking.done()
    go_on.set()
    await asyncio.gather(held, overtaking)
    assert [r.result.session_id for r in await pair[1].results_after(0, 10)] == ["task-0", "task-1"]


async def test_a_group_that_another_program_came_into_the_way_of_is_run_again(
    pair: tuple[Ledger, Ledger], postgres_server: Server
) -> None:
    store = pair[0]
    await store.put_session(making.session())
    runs = 0

    def meddle() -> None:
        postgres_server.execute("UPDATE polar.sessions SET updated_at = updated_at + 1 WHERE session_id = 's'")

    def write(db: Any) -> int:
        nonlocal runs
        runs += 1
        before = db.execute("SELECT updated_at FROM sessions WHERE session_id = 's'").fetchone()[0]
        if runs == 1:
            meddle()
        db.execute("UPDATE sessions SET updated_at = ? WHERE session_id = 's'", (before + 10,))
        return runs

    other = store.put_session(making.session("t"))
    tries, _ = await asyncio.gather(store._write(write), other)  # type: ignore[attr-defined]
    assert tries == 2
    row = postgres_server.execute("SELECT updated_at FROM polar.sessions WHERE session_id = 's'")
    assert row == [(making.session().updated_at + 11,)]
    assert len(await store.sessions()) == 2


# A server that goes away


async def test_writes_and_reads_wait_for_a_server_that_was_killed_and_lose_nothing(mortal: Server) -> None:
    store = open_store(mortal.url())
    await store.open()
    await store.put_session(making.session())
    told: set[str] = set()
    written, enough = asyncio.Event(), False

    async def write(seqs: Iterator[int]) -> None:
        while not enough:
            completion = making.completion(seq=next(seqs))
            await store.put_completion(completion)
            told.add(completion.completion_id)
            written.set()

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for first in range(6):
            group.create_task(write(itertools.count(first, 6)))
        for _ in range(2):
            before = len(told)
            while len(told) < before + 30:
                written.clear()
                await written.wait()
            await asyncio.to_thread(mortal.kill)
            reading = group.create_task(store.completions("s"))
            known = set(told)
            await asyncio.to_thread(mortal.start)
            assert known <= {c.completion_id for c in await reading}
        enough = True
    stored = await store.completions("s")
    assert {c.completion_id for c in stored} == told
    assert all(making.same(c, making.completion(seq=c.seq)) for c in stored)
    await store.close()


@pytest.mark.parametrize("kept", [True, False])
async def test_a_commit_that_was_not_answered_is_repeated_only_if_it_was_not_made(
    pair: tuple[Ledger, Ledger], postgres_server: Server, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    store = pair[0]
    execute = postgres._Connection.execute
    runs, cut = 0, False

    def execute_and_cut(self: Any, sql: str, args: Any = ()) -> Any:
        nonlocal cut
        if sql != "COMMIT" or cut:
            return execute(self, sql, args)
        cut = True
        if kept:
            execute(self, sql, args)
        postgres_server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'polar'"
        )
        return execute(self, "SELECT 1")

    def count(db: Any) -> int:
        nonlocal runs
        runs += 1
        db.execute("INSERT INTO events (body) VALUES ('')")
        return runs

    monkeypatch.setattr(postgres._Connection, "execute", execute_and_cut)
    answer = await store._write(count)  # type: ignore[attr-defined]
    assert cut
    assert answer == runs == (1 if kept else 2)
    assert postgres_server.execute("SELECT count(*) FROM polar.events") == [(1,)]
    assert await store.sessions() == []  # the reading connection was cut as well


async def test_a_server_that_stays_away_is_one_line_in_the_end(
    mortal: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "PATIENCE", 0.5)
    store = open_store(mortal.url())
    await store.open()
    await store.put_session(making.session())
    await asyncio.to_thread(mortal.kill)
    calls = (store.put_session(making.session("t")), store.sessions())
    for failure in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failure, StoreFailure)
        assert "does not answer" in str(failure)
        assert "\n" not in str(failure)
    await asyncio.to_thread(mortal.start)
    await store.put_session(making.session("t"))
    assert [s.session_id for s in await store.sessions()] == ["s", "t"]
    await store.close()


async def test_close_finishes_what_is_queued(postgres_url: str) -> None:
    store = open_store(postgres_url)
    await store.open()
    await store.put_session(making.session())
    calls = [asyncio.ensure_future(store.put_completion(making.completion(seq=seq))) for seq in range(30)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*calls)
    reader = open_store(postgres_url, read_only=True)
    await reader.open()
    assert len(await reader.completions("s")) == 30
    await reader.close()


def test_a_missing_server_is_a_failure_where_one_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.store import postgres_server

    monkeypatch.setattr(postgres_server, "_candidates", list)
    monkeypatch.delenv("POLAR_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no PostgreSQL server here"):
        postgres_server.binaries()
    monkeypatch.setenv("POLAR_REQUIRE_ALL", "1")
    with pytest.raises(pytest.fail.Exception, match="POLAR_REQUIRE_ALL"):
        postgres_server.binaries()
