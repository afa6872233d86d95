"""What a ledger hands on: results by cursor, callbacks that are owed, events, the audit log; and what it forgets."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import psycopg
import pytest

from polar.contract.rollout import AuditEntry
from polar.store import Ledger, SQLiteStore, StoreConflict, events, sqlite
from tests.store import making
from tests.store.postgres_server import Server


async def _run(
    store: Ledger, task_id: str, *, at: float = 1.0, samples: int = 1, calls: int = 0, **task: str
) -> None:
    """A task from its submission to its end, ahead of those that wait."""
    await store.submit(making.task(task_id, num_samples=samples, dispatch_priority=1, **task), at)
    for lease in await store.claim("n", samples, 10.0, at):
        await store.deliver("n", making.delivery(lease, calls=calls, trained=1), at)


# Cursors


async def test_results_are_pulled_in_order_and_acknowledged_for_good(store: Ledger) -> None:
    await _run(store, "a", samples=3)
    await _run(store, "b")
    first = await store.results_after(0, 2)
    assert [r.result.session_id for r in first] == ["a-0", "a-1"]
    await store.acknowledge("trainer", first[-1].cursor)
    await store.acknowledge("trainer", first[0].cursor)  # it never goes back
    cursor = await store.acknowledged("trainer")
    assert cursor == first[-1].cursor
    assert [r.result.session_id for r in await store.results_after(cursor, 10)] == ["a-2", "b-0"]
    assert [r.result.session_id for r in await store.results_after(0, 10, "b")] == ["b-0"]
    assert await store.acknowledged("other") == 0


async def test_a_cursor_never_comes_again_even_when_what_it_stood_on_is_forgotten(store: Ledger) -> None:
    await _run(store, "a", samples=3)
    seen = (await store.results_after(0, 10))[-1].cursor
    assert (await store.purge(100.0)).sessions == 3
    await _run(store, "b")
    assert [r.result.session_id for r in await store.results_after(seen, 10)] == ["b-0"]


async def test_the_result_of_an_attempt_that_was_run_again_is_not_handed_on(store: Ledger) -> None:
    await store.finish_session(making.session(state="ERROR"), making.result(status="ERROR"))
    await store.put_session(making.session(attempt=2))
    assert await store.results_after(0, 10) == []
    await store.finish_session(making.session(state="COMPLETED", attempt=2), making.result(attempt=2))
    assert [(r.cursor, r.result.attempt) for r in await store.results_after(0, 10)] == [(2, 2)]


# Callbacks


async def test_a_callback_is_due_when_the_last_session_has_ended(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2, callback_url="http://t/done"), 0.0)
    await store.submit(making.task("quiet"), 0.0)
    one, other, quiet = await store.claim("n", 3, 10.0, 0.0)
    await store.deliver("n", making.delivery(one), 1.0)
    await store.deliver("n", making.delivery(quiet), 1.0)
    assert await store.callbacks_due(9.0) == []
    await store.deliver("n", making.delivery(other), 2.0)
    assert await store.callbacks_due(9.0) == [("task", "http://t/done", 0, 2.0)]


async def test_a_callback_is_tried_until_it_arrives_or_is_given_up(store: Ledger) -> None:
    for name in ("a", "b"):
        await _run(store, name, callback_url=f"http://{name}")
        await store.callback_tried(name, arrived=False, retry_at=50.0, error="refused")
    assert await store.callbacks_due(49.0) == []
    assert await store.callbacks_due(50.0) == [("a", "http://a", 1, 50.0), ("b", "http://b", 1, 50.0)]
    assert await store.callbacks_failed() == [("a", "refused"), ("b", "refused")]
    await store.callback_tried("a", arrived=True, retry_at=None, error=None)
    await store.callback_tried("b", arrived=False, retry_at=None, error="gone \udcff")
    assert await store.callbacks_due(999.0) == []
    assert await store.callbacks_failed() == [("b", "gone \udcff")]
    await store.callback_tried("a", arrived=False, retry_at=60.0, error="an older try")
    assert await store.callbacks_due(999.0) == []


async def test_of_several_who_would_send_a_callback_one_takes_it(store: Ledger) -> None:
    await _run(store, "a", callback_url="http://a")
    (due,) = await store.callbacks_due(5.0)
    both = await asyncio.gather(*(store.put_off_callback(due, until) for until in (35.0, 45.0)))
    assert sorted(both) == [False, True]
    assert await store.callbacks_due(30.0) == []
    (again,) = await store.callbacks_due(100.0)  # whoever took it has died
    assert await store.put_off_callback(again, 200.0)
    assert not await store.put_off_callback(again, 300.0)
    assert await store.put_off_callback(again._replace(due_at=200.0), 6.0)  # given back
    assert [each.due_at for each in await store.callbacks_due(6.0)] == [6.0]
    await store.callback_tried("a", arrived=True, retry_at=None, error=None)
    assert not await store.put_off_callback(again._replace(due_at=6.0), 400.0)  # it is owed no more
    assert await store.callbacks_due(999.0) == []


async def test_a_task_without_sessions_is_over_at_once(store: Ledger) -> None:
    await store.submit(making.task(num_samples=0, callback_url="http://t"), 1.0)
    assert await store.callbacks_due(1.0) == [("task", "http://t", 0, 1.0)]
    assert await store.progress() == [("task", "completed", 0, 0, 0)]


# Events and the audit log


async def test_events_tell_each_state_once_and_in_order(store: Ledger) -> None:
    await store.submit(making.task(), 1.0)
    (lease,) = await store.claim("n", 1, 10.0, 2.0)
    for now in (3.0, 4.0):
        await store.renew("n", [making.held(lease)], 10.0, now)
    await store.deliver("n", making.delivery(lease), 5.0)
    await store.deliver("n", making.delivery(lease), 6.0)
    told = await store.events_after(0)
    assert [(e.kind, e.subject, e.state, e.time) for e in told] == [
        ("task", "task", "running", 1.0),
        ("session", "task-0", "REGISTERED", 1.0),
        ("session", "task-0", "RUNNING", 3.0),
        ("session", "task-0", "COMPLETED", 5.0),
        ("task", "task", "completed", 5.0),
    ]
    assert {e.task_id for e in told} == {"task"}
    assert told[3].data == {"attempt": 1}
    assert await store.events_after(told[2].id, limit=1) == [told[3]]


async def test_only_the_newest_events_are_kept(store: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "EVENTS_KEPT", 10)
    await store.submit(making.task(num_samples=50), 1.0)
    await store.expire(1.0)
    kept = await store.events_after(0)
    assert [e.subject for e in kept] == [f"task-{i}" for i in range(40, 50)]
    await store.cancel("task", 2.0)
    assert (await store.events_after(kept[-1].id))[0].id == kept[-1].id + 1


async def test_the_audit_log_is_appended_to(store: Ledger) -> None:
    entries = [
        AuditEntry(time=float(i), actor="admin", action="cancel", subject=f"t{i}", allowed=i != 1, detail="\0 \ud83d")
        for i in range(3)
    ]
    for entry in entries:
        await store.audit(entry)
    assert await store.audit_log() == entries
    assert await store.audit_log(2) == entries[1:]


@pytest.mark.parametrize("change", ["UPDATE audit SET body = body", "DELETE FROM audit"])
async def test_the_audit_log_of_a_file_refuses_changes(sqlite_store: Ledger, tmp_path: Path, change: str) -> None:
    await sqlite_store.audit(AuditEntry(time=1.0, actor="a", action="b", subject="c"))
    with sqlite3.connect(tmp_path / "polar.db") as db, pytest.raises(sqlite3.IntegrityError, match="log is kept"):
        db.execute(change)


@pytest.mark.parametrize(
    "change", ["UPDATE polar.audit SET body = body", "DELETE FROM polar.audit", "TRUNCATE polar.audit"]
)
async def test_the_audit_log_of_postgresql_refuses_changes(
    postgres_url: str, postgres_server: Server, change: str
) -> None:
    from polar.store import open_store

    store = open_store(postgres_url)
    await store.open()
    await store.audit(AuditEntry(time=1.0, actor="a", action="b", subject="c"))
    await store.close()
    with pytest.raises(psycopg.errors.RaiseException, match="log is kept"):
        postgres_server.execute(change)


# Retention


async def test_what_ended_long_ago_is_forgotten_whole(store: Ledger) -> None:
    await _run(store, "old", at=1.0, samples=2, calls=3)
    await _run(store, "fresh", at=50.0, calls=1)
    await store.submit(making.task("waiting"), 1.0)
    await store.finish_session(
        making.session("bare", state="ERROR", task_id="none"), making.result("bare", task_id="none", status="ERROR")
    )
    await store.put_session(making.session("capturing", task_id="none"))
    await store.put_task(making.task("just put"))
    assert await store.purge(50.0) == (1, 3, 6)
    assert await store.purge(50.0) == (0, 0, 0)
    assert [t.task_id for t in await store.tasks()] == ["fresh", "waiting", "just put"]
    assert [s.session_id for s in await store.sessions()] == ["fresh-0", "waiting-0", "capturing"]
    assert [r.session_id for r in await store.results()] == ["fresh-0"]
    assert await store.completions("old-0") == []
    await _run(store, "old", at=60.0, samples=2, calls=3)  # its names are free again
    assert len(await store.completions("old-1")) == 3


async def test_what_is_shared_goes_with_the_last_that_refers_to_it(store: Ledger) -> None:
    tools = making.large_tools(10)
    for at, name in ((1.0, "a"), (60.0, "b")):
        await store.put_session(making.session(name, updated_at=at))
        await store.put_completion(making.completion(name, tools=tools))
        await store.finish_session(making.session(name, state="COMPLETED", updated_at=at), making.result(name))
    assert (await store.purge(50.0)).sessions == 1
    (kept,) = await store.completions("b")
    assert kept.tools == tools
    assert (await store.purge(100.0)).sessions == 1
    await store.put_session(making.session("c"))
    await store.put_completion(making.completion("c", tools=tools))
    assert (await store.completions("c"))[0].tools == tools


async def test_a_task_is_kept_until_its_callback_has_arrived(store: Ledger) -> None:
    await _run(store, "a", callback_url="http://t")
    assert (await store.purge(100.0)).tasks == 0
    await store.callback_tried("a", arrived=True, retry_at=None, error=None)
    assert (await store.purge(100.0)).tasks == 1


async def test_what_is_forgotten_is_gone_from_the_file_and_its_log(sqlite_store: Ledger, tmp_path: Path) -> None:
    await sqlite_store.submit(making.task("t", metadata={"long": "a secret" * 2000}), 1.0)
    (lease,) = await sqlite_store.claim("n", 1, 30.0, 1.0)
    await sqlite_store.deliver("n", making.delivery(lease, calls=2, status="ERROR", error="a secret"), 2.0)
    assert "secret" in str(await sqlite_store.events_after(0))
    assert (await sqlite_store.purge(100.0)).tasks == 1
    assert "secret" not in str(await sqlite_store.events_after(0))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["polar.db", "polar.db-shm", "polar.db-wal", "polar.db.lock"]
    assert not [name for name in files if b"secret" in (tmp_path / name).read_bytes()]


class Wipes:
    """Sees the log being emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: float) -> None:
        self.count = 0
        self.one = asyncio.Event()
        self._empty, self._loop = sqlite._empty_log, asyncio.get_running_loop()
        monkeypatch.setattr(sqlite, "_empty_log", self.wipe)
        monkeypatch.setattr(sqlite, "WIPE_AFTER", after)

    def wipe(self, path: Path) -> None:
        self._empty(path)
        self.count += 1
        self._loop.call_soon_threadsafe(self.one.set)


async def _bare_with_secrets(store: Ledger, count: int) -> list[str]:
    names = [f"bare-{index}" for index in range(count)]
    for name in names:
        await store.put_session(making.session(name, task_id=name, metadata={"long": "a secret" * 2000}))
    return names


async def test_a_session_that_is_forgotten_goes_from_the_log_a_moment_later(
    sqlite_store: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in await _bare_with_secrets(sqlite_store, 2):
        wipes = Wipes(monkeypatch, after=0.0)
        await sqlite_store.forget_session(name)
        async with asyncio.timeout(30):
            await wipes.one.wait()
        monkeypatch.undo()
    assert not [path.name for path in tmp_path.iterdir() if b"secret" in path.read_bytes()]


async def test_many_sessions_that_are_forgotten_cost_one_wipe_and_none_is_left_when_the_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wipes = Wipes(monkeypatch, after=3600.0)
    store = SQLiteStore(tmp_path / "polar.db")
    await store.open()
    for name in await _bare_with_secrets(store, 10):
        await store.forget_session(name)
    assert wipes.count == 0
    await store.close()
    assert wipes.count == 1
    assert not [path.name for path in tmp_path.iterdir() if b"secret" in path.read_bytes()]


async def test_nodes_long_gone_are_forgotten(store: Ledger) -> None:
    await store.put_node(making.node("gone"), 0.0)
    await store.put_node(making.node("here"), 1000.0)
    await store.expire(1001.0)
    await store.purge(500.0)
    assert [n.node_id for n in await store.nodes(1001.0)] == ["here"]


async def test_a_result_is_usable_however_odd_its_metadata_is(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2, early_stop_min_usable_sessions=1), 0.0)
    odd, _ = await store.claim("n", 1, 10.0, 0.0), None
    given = making.delivery(odd[0])
    assert given.result is not None
    given.result.trajectory = msgspec.structs.replace(
        given.result.trajectory, metadata={"reconstruction": ["not", "a", "report"]}
    )
    await store.deliver("n", given, 1.0)
    assert await store.progress() == [("task", "running", 2, 1, 0)]


# Numbers


async def test_sessions_are_counted_and_listed_without_reading_them_all(store: Ledger) -> None:
    assert (await store.session_states(), await store.newest_result(), await store.newest_event()) == ({}, 0, 0)
    await _run(store, "a", samples=2, at=1.0)
    await _run(store, "b", at=2.0)
    await store.submit(making.task("c", num_samples=3), 3.0)
    assert await store.session_states() == {"COMPLETED": 3, "REGISTERED": 3}
    assert [record.session_id for record in await store.recent_sessions(limit=2)] == ["c-2", "c-1"]
    ended = await store.recent_sessions(state="COMPLETED")
    assert [record.session_id for record in ended] == ["b-0", "a-1", "a-0"]
    assert [record.session_id for record in await store.recent_sessions(task_id="a", state="COMPLETED", limit=1)] == [
        "a-1"
    ]
    assert await store.recent_sessions(task_id="a", state="REGISTERED") == []
    assert await store.newest_result() == (await store.results_after(0, 100))[-1].cursor
    assert await store.newest_event() == (await store.events_after(0))[-1].id


async def test_a_result_is_found_by_its_attempt(store: Ledger) -> None:
    await _run(store, "a", samples=2)
    found = await store.result("a-1", 1)
    assert found is not None
    assert (found.session_id, found.task_id) == ("a-1", "a")
    assert await store.result("a-1", 2) is None
    assert await store.result("nobody", 1) is None


async def test_what_is_due_to_some_hosts_can_be_left_out(store: Ledger) -> None:
    urls = {
        "a": "http://Dead:80/x",
        "b": "https://dead:80?token=1",
        "c": "http://dead:80",
        "d": "http://dead:8080/x",
        "e": "http://live/dead:80/",
    }
    for name, url in urls.items():
        await _run(store, name, callback_url=url)
    assert [due.task_id for due in await store.callbacks_due(10.0)] == list("abcde")
    assert [due.task_id for due in await store.callbacks_due(10.0, but_not=["dead:80"])] == ["d", "e"]
    assert [due.task_id for due in await store.callbacks_due(10.0, but_not=["dead:80", "live"])] == ["d"]


async def test_one_session_of_no_task_is_forgotten_with_what_is_its_own(store: Ledger) -> None:
    tools = making.large_tools()
    for name in ("bare", "other"):
        await store.put_session(making.session(name, task_id=name))
        await store.put_completion(making.completion(name, tools=tools))
    await store.finish_session(making.session("bare", task_id="bare", state="ERROR"), making.result(
        "bare", task_id="bare", status="ERROR"
    ))  # fmt: skip
    assert await store.forget_session("bare") == 1
    assert await store.forget_session("bare") == 0
    assert [s.session_id for s in await store.sessions()] == ["other"]
    assert await store.results() == []
    assert (await store.completions("other"))[0].tools == tools
    await store.submit(making.task(), 0.0)
    with pytest.raises(StoreConflict, match="is of task task"):
        await store.forget_session("task-0")


async def test_what_a_node_still_has_of_a_forgotten_session_is_not_forgotten(store: Ledger) -> None:
    for name in ("one", "two"):
        await store.put_session(making.session(name, task_id=name))
    await store.put_completion(making.completion("one"))
    assert [await store.forget_there_later("one", "n1") for _ in range(2)] == [1, 0]
    await store.forget_there_later("two", "n2")
    await store.forget_session("two")
    assert await store.sessions() == []
    await store.purge(1e12)
    assert await store.to_forget() == [("one", "n1"), ("two", "n2")]
    await store.forgotten_there("one", "n2")
    await store.forgotten_there("two", "n2")
    assert await store.to_forget() == [("one", "n1")]
    await store.submit(making.task(), 0.0)
    with pytest.raises(StoreConflict, match="is of task task"):
        await store.forget_there_later("task-0", "n1")
    assert await store.to_forget() == [("one", "n1")]
