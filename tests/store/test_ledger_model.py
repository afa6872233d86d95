"""Whatever nodes, trainers and operators do, in whatever order, a ledger says what a small model of it says: nobody
holds what another holds, every session ends once, counts add up, and cursors only go forward.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from polar.contract.rollout import Delivery, Lease
from polar.contract.task import TaskRequest
from polar.store import StoreConflict, open_store
from polar.store.ledger import MAX_ATTEMPTS, MAX_HANDED_BACK, StoredResult
from tests.store import making
from tests.store.postgres_server import Server

NODES = ("n0", "n1", "n2")
SECONDS = 10.0


@dataclass
class Session:
    """What is true of a session. ``holder`` is who may write under its newest attempt."""

    task: TaskRequest
    attempt: int = 1
    state: str = "REGISTERED"
    holder: str | None = None
    lapses: float = 0.0
    handed_back: int = 0
    refused: int = 0
    cancelled: str | None = None

    @property
    def ended(self) -> bool:
        return self.state in ("COMPLETED", "ERROR", "TIMEOUT")


@dataclass
class Truth:
    """The model: all sessions in the order in which they came, and the ids of those that ended in theirs."""

    sessions: dict[str, Session] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    usable: dict[str, int] = field(default_factory=dict)

    def waiting(self) -> list[str]:
        names = [n for n, s in self.sessions.items() if not s.ended and s.holder is None]
        return sorted(names, key=lambda name: -self.sessions[name].task.dispatch_priority)

    def of(self, task_id: str) -> list[Session]:
        return [s for s in self.sessions.values() if s.task.task_id == task_id]

    def end(self, name: str, state: str, trained: int = 0) -> None:
        session = self.sessions[name]
        session.state, session.holder = state, None
        self.ended.append(name)
        task = session.task
        if state == "COMPLETED" and trained:
            self.usable[task.task_id] = self.usable.get(task.task_id, 0) + 1
            enough = task.early_stop_min_usable_sessions
            if enough is not None and self.usable[task.task_id] >= enough:
                self.cancel(task.task_id, "early stop")

    def cancel(self, task_id: str, reason: str) -> None:
        for name, session in self.sessions.items():
            if session.task.task_id == task_id and not session.ended:
                session.cancelled = session.cancelled or reason
                if session.holder is None:
                    self.end(name, "ERROR")

    def take_back(self, name: str, *, counts: bool, error: bool = False) -> None:
        session = self.sessions[name]
        session.refused += error
        exhausted = counts and session.attempt - session.handed_back >= MAX_ATTEMPTS
        if session.cancelled or exhausted or (error and session.refused >= MAX_HANDED_BACK):
            self.end(name, "ERROR")
            return
        session.attempt, session.state, session.holder = session.attempt + 1, "REGISTERED", None
        session.handed_back += not counts


class LedgerMachine(RuleBasedStateMachine):
    """Three nodes that may be late, cut off or doubled, over one ledger that may be closed and opened again."""

    url: str | None = None  # a file of its own, unless a database is named

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.mkdtemp(prefix="polar-model-")
        self.store = open_store(self.url or f"{self.folder}/polar.db")
        self.do(self.store.open())
        self.now = 100.0
        self.truth = Truth()
        self.believed: list[tuple[str, Lease]] = []  # what nodes were once given, whether they still hold it or not
        self.accepted: list[tuple[str, Delivery]] = []
        self.seen: list[StoredResult] = []
        self.acknowledged = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.do(self.store.close())
        self.loop.close()
        shutil.rmtree(self.folder)

    def holds(self, node: str, lease: Lease) -> bool:
        session = self.truth.sessions[lease.session_id]
        return session.holder == node and session.attempt == lease.attempt

    # What trainers do

    @rule(
        samples=st.integers(0, 4),
        priority=st.integers(0, 2),
        enough=st.none() | st.integers(1, 2),
        callback=st.booleans(),
    )
    def submit(self, samples: int, priority: int, enough: int | None, callback: bool) -> None:
        task = making.task(
            f"t{len(self.do(self.store.tasks()))}",
            num_samples=samples,
            dispatch_priority=priority,
            early_stop_min_usable_sessions=enough,
            callback_url="http://t" if callback else None,
        )
        assert self.do(self.store.submit(task, self.now)) is True
        assert self.do(self.store.submit(task, self.now)) is False
        for sample in range(samples):
            self.truth.sessions[task.session_id(sample)] = Session(task)

    @precondition(lambda self: self.truth.sessions)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from([s.task.task_id for s in self.truth.sessions.values()]))
        self.truth.cancel(task_id, "cancelled")
        self.do(self.store.cancel(task_id, self.now))

    @rule(limit=st.integers(1, 3))
    def pull(self, limit: int) -> None:
        found = self.do(self.store.results_after(self.acknowledged, limit))
        if found:
            self.acknowledged = found[-1].cursor
            self.do(self.store.acknowledge("trainer", self.acknowledged))
        self.do(self.store.acknowledge("trainer", self.acknowledged - 1))
        assert self.do(self.store.acknowledged("trainer")) == self.acknowledged

    # What nodes do

    @rule(node=st.sampled_from(NODES), room=st.integers(0, 3), twice=st.booleans())
    def claim(self, node: str, room: int, twice: bool) -> None:
        due = self.truth.waiting()[:room]
        asked = f"claim-{len(self.believed)}-{node}" if twice else None
        leases = self.do(self.store.claim(node, room, SECONDS, self.now, claim_id=asked))
        if twice and due:
            assert self.do(self.store.claim(node, room, SECONDS, self.now, claim_id=asked)) == leases
        assert [lease.session_id for lease in leases] == due
        for lease in leases:
            session = self.truth.sessions[lease.session_id]
            assert session.holder is None
            assert lease.attempt == session.attempt
            session.holder, session.lapses = node, self.now + SECONDS
            self.believed.append((node, lease))

    @rule(node=st.sampled_from(NODES), state=st.sampled_from(["INITIALIZING", "RUNNING", "BUILDING"]))
    def renew(self, node: str, state: str) -> None:
        mine = [lease for who, lease in self.believed if who == node]
        reply = self.do(self.store.renew(node, [making.held(lease, state) for lease in mine], SECONDS, self.now))
        kept = [lease for lease in mine if self.holds(node, lease)]
        assert reply.lost == [lease.session_id for lease in mine if lease not in kept]
        sessions = self.truth.sessions
        assert reply.cancelled == {
            lease.session_id: sessions[lease.session_id].cancelled
            for lease in kept
            if sessions[lease.session_id].cancelled
        }
        for lease in kept:
            session = sessions[lease.session_id]
            session.state, session.lapses = state, self.now + SECONDS

    @precondition(lambda self: self.believed)
    @rule(
        data=st.data(),
        status=st.sampled_from(["COMPLETED", "COMPLETED", "ERROR", "TIMEOUT"]),
        trained=st.integers(0, 1),
        calls=st.integers(0, 2),
        by=st.sampled_from(["its holder", *NODES]),
    )
    def deliver(self, data: st.DataObject, status: str, trained: int, calls: int, by: str) -> None:
        node, lease = data.draw(st.sampled_from(self.believed))
        node = node if by == "its holder" else by
        given = making.delivery(lease, status=status, trained=trained, calls=calls, timing={"run": self.now})
        if self.holds(node, lease):
            self.do(self.store.deliver(node, given, self.now))
            self.accepted.append((node, given))
            self.truth.end(lease.session_id, status, trained)
        elif (node, given.result) not in [(who, earlier.result) for who, earlier in self.accepted]:
            with pytest.raises(StoreConflict):
                self.do(self.store.deliver(node, given, self.now))

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        self.do(self.store.deliver(*data.draw(st.sampled_from(self.accepted)), self.now))

    @precondition(lambda self: self.believed)
    @rule(data=st.data(), error=st.none() | st.just("the disk is full"))
    def release(self, data: st.DataObject, error: str | None) -> None:
        node, lease = data.draw(st.sampled_from(self.believed))
        self.do(self.store.release(node, lease.session_id, lease.attempt, self.now, error))
        if self.holds(node, lease):
            self.truth.take_back(lease.session_id, counts=False, error=error is not None)

    # What happens by itself

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        lapsed = [n for n, s in self.truth.sessions.items() if s.holder is not None and s.lapses <= self.now]
        for name in lapsed:
            self.truth.take_back(name, counts=True)
        assert [record.session_id for record in self.do(self.store.expire(self.now))] == lapsed

    @rule()
    def close_and_open(self) -> None:
        self.do(self.store.close())
        self.store = open_store(self.url or f"{self.folder}/polar.db")
        self.do(self.store.open())

    # What must hold

    @invariant()
    def sessions_are_where_the_model_says(self) -> None:
        stored = {s.session_id: (s.attempt, s.state) for s in self.do(self.store.sessions())}
        assert stored == {name: (s.attempt, s.state) for name, s in self.truth.sessions.items()}

    @invariant()
    def every_end_has_one_result_and_results_only_grow(self) -> None:
        results = self.do(self.store.results_after(0, 1000))
        assert results[: len(self.seen)] == self.seen
        self.seen = results
        cursors = [stored.cursor for stored in results]
        assert cursors == sorted(set(cursors))
        ended = {(r.result.session_id, r.result.attempt, r.result.status) for r in results}
        assert ended == {(n, s.attempt, s.state) for n, s in self.truth.sessions.items() if s.ended}
        assert len(results) == len(ended)

    @invariant()
    def counts_add_up(self) -> None:
        for told in self.do(self.store.progress()):
            sessions = self.truth.of(told.task_id)
            ended = sum(session.ended for session in sessions)
            assert (told.sessions, told.ended) == (len(sessions), ended)
            assert told.usable == self.truth.usable.get(told.task_id, 0)
            assert (told.status == "running") == (ended < len(sessions))

    @invariant()
    def callbacks_are_due_for_exactly_the_tasks_that_are_over(self) -> None:
        tasks = {t.task_id: t for t in self.do(self.store.tasks())}
        over = {n for n, t in tasks.items() if t.callback_url and all(s.ended for s in self.truth.of(n))}
        assert {due.task_id for due in self.do(self.store.callbacks_due(self.now))} == over


def _settings(examples: int, steps: int) -> settings:
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=slow)


def test_a_ledger_in_a_file_is_as_its_model() -> None:
    run_state_machine_as_test(LedgerMachine, settings=_settings(15, 30))


@pytest.mark.slow
def test_a_ledger_in_a_file_is_as_its_model_for_long() -> None:
    run_state_machine_as_test(LedgerMachine, settings=_settings(80, 50))


@pytest.mark.slow
def test_a_ledger_in_postgresql_is_as_its_model(postgres_server: Server) -> None:
    class Machine(LedgerMachine):
        url = postgres_server.url()

        def teardown(self) -> None:
            super().teardown()
            postgres_server.clean()

    run_state_machine_as_test(Machine, settings=_settings(15, 40))
