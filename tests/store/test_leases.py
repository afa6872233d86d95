"""Sessions given out under leases: who gets what, who keeps it, and what becomes of what is let go of."""

from __future__ import annotations

import msgspec
import pytest

from polar.contract.rollout import NodeLoad
from polar.store import Ledger, StoreConflict
from polar.store.ledger import MAX_ATTEMPTS, MAX_HANDED_BACK
from tests.store import making


async def _claim(store: Ledger, room: int = 10, node: str = "n", now: float = 0.0, **more: str) -> list:
    return await store.claim(node, room, 10.0, now, **more)


async def test_a_submitted_task_waits_as_its_sessions(store: Ledger) -> None:
    task = making.task(num_samples=3)
    assert await store.submit(task, 5.0) is True
    assert await store.submit(task, 6.0) is False
    with pytest.raises(StoreConflict, match="another body"):
        await store.submit(making.task(num_samples=4), 6.0)
    sessions = await store.sessions("task")
    assert [(s.session_id, s.state, s.attempt, s.created_at) for s in sessions] == [
        (f"task-{i}", "REGISTERED", 1, 5.0) for i in range(3)
    ]
    assert await store.progress() == [("task", "running", 3, 0, 0)]
    assert await store.progress("other") == []


async def test_a_task_whose_session_is_anothers_is_refused_whole(store: Ledger) -> None:
    await store.put_session(making.session("task-1", task_id="older"))
    with pytest.raises(StoreConflict, match="session task-1 belongs to task older"):
        await store.submit(making.task(num_samples=2), 0.0)
    assert await store.tasks() == []
    assert await store.session("task-0") is None


async def test_higher_priority_first_then_oldest_first(store: Ledger) -> None:
    await store.submit(making.task("old", num_samples=2), 0.0)
    await store.submit(making.task("urgent", num_samples=2, dispatch_priority=9), 1.0)
    await store.submit(making.task("new", num_samples=1), 2.0)
    first = await _claim(store, 3)
    assert [lease.session_id for lease in first] == ["urgent-0", "urgent-1", "old-0"]
    assert (first[0].task, first[0].sample_index, first[1].sample_index) == (
        making.task("urgent", num_samples=2, dispatch_priority=9), 0, 1,
    )  # fmt: skip
    assert [lease.session_id for lease in await _claim(store)] == ["old-1", "new-0"]
    assert await _claim(store) == []


async def test_sessions_that_somebody_put_there_are_not_given_out(store: Ledger) -> None:
    await store.put_task(making.task())
    await store.put_session(making.session(state="REGISTERED"))
    assert await _claim(store) == []


async def test_a_claim_that_is_asked_again_gets_what_it_got_before(store: Ledger) -> None:
    await store.submit(making.task(num_samples=4), 0.0)
    first = await _claim(store, 2, claim_id="a")
    assert await _claim(store, 2, claim_id="a", now=1.0) == first
    assert [lease.session_id for lease in await _claim(store, 2, claim_id="b")] == ["task-2", "task-3"]
    await store.deliver("n", making.delivery(first[0]), 2.0)
    assert await _claim(store, 2, claim_id="a") == first[1:]


async def test_heartbeats_keep_leases_and_say_where_sessions_stand(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2), 0.0)
    kept, lapsing = await _claim(store)
    reply = await store.renew("n", [making.held(kept, "INITIALIZING")], 10.0, 5.0)
    assert (reply.lost, reply.cancelled, reply.drain) == ([], {}, False)
    assert [s.session_id for s in await store.expire(10.0)] == ["task-1"]
    states = [(s.state, s.attempt) for s in await store.sessions()]
    assert states == [("INITIALIZING", 1), ("REGISTERED", 2)]
    reply = await store.renew("n", [making.held(kept), making.held(lapsing)], 10.0, 12.0)
    assert reply.lost == ["task-1"]
    assert await store.expire(15.0) == []
    reply = await store.renew("n", [making.held(kept, "COMPLETED")], 10.0, 16.0)  # its result is on its way
    assert reply.lost == []
    assert (await store.sessions())[0].state == "RUNNING"


async def test_an_attempt_that_lapsed_goes_to_another_node_and_the_old_one_can_write_no_more(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    (old,) = await _claim(store)
    assert await _claim(store, node="m") == []
    await store.expire(10.0)
    (new,) = await _claim(store, node="m", now=11.0)
    assert (new.session_id, new.attempt) == ("task-0", 2)
    assert (await store.renew("n", [making.held(old)], 10.0, 12.0)).lost == ["task-0"]
    await store.release("n", "task-0", 1, 12.0)
    await store.release("n", "task-0", 2, 12.0)
    for stale in (making.delivery(old), msgspec.structs.replace(making.delivery(old), completions=[])):
        with pytest.raises(StoreConflict, match="attempt 1 is over, it is at attempt 2"):
            await store.deliver("n", stale, 12.0)
    with pytest.raises(StoreConflict, match="node n does not hold session task-0 attempt 2"):
        await store.deliver("n", making.delivery(new), 12.0)
    assert await store.results() == []
    await store.deliver("m", making.delivery(new), 13.0)
    assert [(r.attempt, r.status) for r in await store.results()] == [(2, "COMPLETED")]


async def test_calls_of_an_attempt_that_is_over_are_kept_as_history_of_who_held_it(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    (old,) = await _claim(store)
    await store.expire(10.0)
    (new,) = await _claim(store, node="m", now=11.0)
    late = msgspec.structs.replace(making.delivery(old, calls=2), result=None)
    await store.deliver("n", late, 12.0)
    await store.deliver("n", late, 12.0)
    assert len(await store.completions("task-0", attempt=1)) == 2
    assert await store.completions("task-0") == []
    with pytest.raises(StoreConflict, match="does not hold"):
        await store.deliver("m", late, 12.0)
    await store.deliver("m", making.delivery(new, calls=1), 13.0)
    await store.deliver("m", msgspec.structs.replace(making.delivery(new, calls=3), result=None), 14.0)
    assert len(await store.completions("task-0")) == 3


async def test_a_delivery_may_come_again_and_only_the_same(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    (lease,) = await _claim(store)
    given = making.delivery(lease, calls=2, trained=5)
    await store.deliver("n", given, 1.0)
    await store.deliver("n", given, 2.0)
    with pytest.raises(StoreConflict, match="finished with another result"):
        await store.deliver("n", making.delivery(lease, trained=6), 3.0)
    assert [r.cursor for r in await store.results_after(0, 10)] == [1]
    ended = await store.session("task-0")
    assert ended is not None
    assert (ended.state, ended.updated_at) == ("COMPLETED", 1.0)


async def test_a_delivery_with_parts_of_something_else_is_a_mistake(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2), 0.0)
    one, other = await _claim(store)
    mixed = msgspec.structs.replace(making.delivery(one), completions=making.delivery(other, calls=1).completions)
    foreign = msgspec.structs.replace(making.delivery(one), result=making.delivery(other).result)
    for wrong in (mixed, foreign):
        with pytest.raises(ValueError, match="parts of something else"):
            await store.deliver("n", wrong, 1.0)
    with pytest.raises(StoreConflict, match="is of task task"):
        stray = making.delivery(one)
        assert stray.result is not None
        stray.result.task_id = "other"
        await store.deliver("n", stray, 1.0)
    with pytest.raises(StoreConflict, match="is not stored"):
        await store.deliver("n", making.delivery(msgspec.structs.replace(one, session_id="unknown")), 1.0)


async def test_a_session_lost_too_often_ends_with_its_calls_accounted_for(store: Ledger) -> None:
    await store.submit(making.task(metadata={"group_id": "g"}), 0.0)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        (lease,) = await _claim(store, now=attempt * 100.0)
        assert lease.attempt == attempt
        await store.deliver(
            "n", msgspec.structs.replace(making.delivery(lease, calls=2), result=None), attempt * 100.0
        )
        (record,) = await store.expire(attempt * 100.0 + 10)
    assert (record.state, record.attempt) == ("ERROR", MAX_ATTEMPTS)
    assert record.error is not None
    assert record.error.startswith("attempts exhausted")
    (result,) = await store.results()
    assert (result.status, result.error, result.node_id) == ("ERROR", record.error, "n")
    assert result.metadata == {"group_id": "g"}
    fates = result.trajectory.metadata["reconstruction"]["completions"]
    assert fates == {"not_built": [c.completion_id for c in await store.completions("task-0")]}
    assert await _claim(store, now=999.0) == []
    assert await store.progress() == [("task", "completed", 1, 1, 0)]


async def test_handing_back_does_not_count_against_the_cap(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    for attempt in range(1, MAX_ATTEMPTS + 3):
        (lease,) = await _claim(store)
        assert lease.attempt == attempt
        await store.release("n", "task-0", attempt, 1.0)
        await store.release("n", "task-0", attempt, 1.0)  # once more: nothing
    for _ in range(MAX_ATTEMPTS):
        assert len(await _claim(store, now=5.0)) == 1
        (record,) = await store.expire(100.0)
    assert record.state == "ERROR"


async def test_a_session_that_every_node_hands_back_because_of_an_error_ends(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    for number in range(1, MAX_HANDED_BACK + 1):
        (drained,) = await _claim(store, node="drains")
        await store.release("drains", "task-0", drained.attempt, 1.0)  # which may happen as often as it likes
        (lease,) = await _claim(store, node=f"n{number}")
        for _ in range(2):  # the answer was lost, and it is handed back once more: that counts once
            await store.release(f"n{number}", "task-0", lease.attempt, 1.0, error="the disk is full")
    assert await _claim(store) == []
    (result,) = await store.results()
    assert (result.status, result.attempt) == ("ERROR", 2 * MAX_HANDED_BACK)
    assert result.error == (
        f"attempts exhausted: handed back {MAX_HANDED_BACK} times, at last by node n{MAX_HANDED_BACK}: "
        "the disk is full"
    )
    assert await store.progress() == [("task", "completed", 1, 1, 0)]


async def test_cancelling_ends_what_waits_and_tells_those_who_hold_the_rest(store: Ledger) -> None:
    await store.submit(making.task(num_samples=4), 0.0)
    ends, lapses, returns = await _claim(store, 3)
    records = await store.cancel("task", 1.0)
    assert records is not None
    assert [(r.state, r.error) for r in records] == [("REGISTERED", None)] * 3 + [("ERROR", "cancelled")]
    assert await store.cancel("task", 2.0, "again") == records
    assert await store.cancel("unknown", 1.0) is None
    assert (await store.progress())[0].status == "running"
    assert await _claim(store, node="m") == []

    reply = await store.renew("n", [making.held(ends), making.held(returns)], 10.0, 5.0)
    assert reply.cancelled == {"task-0": "cancelled", "task-2": "cancelled"}
    await store.deliver("n", making.delivery(ends, status="ERROR", error="cancelled"), 6.0)
    await store.release("n", "task-2", returns.attempt, 7.0)
    assert [r.session_id for r in await store.expire(10.0)] == [lapses.session_id]
    ended = [(s.state, s.error) for s in await store.sessions()]
    assert ended == [("ERROR", "cancelled")] * 4
    assert len(await store.results()) == 4
    assert await store.progress() == [("task", "cancelled", 4, 4, 0)]
    assert await store.cancel("task", 11.0) == await store.sessions("task")


async def test_a_task_that_is_over_can_not_be_cancelled_any_more(store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    (lease,) = await _claim(store)
    await store.deliver("n", making.delivery(lease), 1.0)
    await store.cancel("task", 2.0)
    assert (await store.progress())[0].status == "completed"


async def test_with_enough_usable_sessions_the_rest_is_cancelled_in_the_same_moment(store: Ledger) -> None:
    await store.submit(making.task(num_samples=6, early_stop_min_usable_sessions=2), 0.0)
    first, second, third, running = await _claim(store, 4)
    await store.deliver("n", making.delivery(first, trained=3), 1.0)
    await store.deliver("n", making.delivery(second, trained=0), 1.0)  # nothing to train: not usable
    assert (await store.progress())[0].ended == 2
    await store.deliver("n", making.delivery(third, trained=1), 2.0)
    assert await store.progress() == [("task", "running", 6, 5, 2)]
    reason = "early stop: 2 usable sessions"
    assert [s.error for s in await store.sessions()] == [None, None, None, None, reason, reason]
    assert (await store.renew("n", [making.held(running)], 10.0, 3.0)).cancelled == {"task-3": reason}
    await store.deliver("n", making.delivery(running, trained=7), 4.0)  # it ended before it heard
    assert await store.progress() == [("task", "completed", 6, 6, 3)]


async def test_a_node_writes_to_the_ledger_itself_where_both_are_one_process(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2), 0.0)
    lease, late = await _claim(store)
    running = making.session("task-0", state="RUNNING", updated_at=1.0)
    await store.put_session(running)
    await store.put_completion(making.completion("task-0"))
    ended = msgspec.structs.replace(running, state="COMPLETED", updated_at=2.0)
    await store.finish_session(ended, making.result("task-0"))
    assert (await store.nodes(0.0)) == []
    assert (await store.renew("n", [making.held(lease)], 10.0, 3.0)).lost == ["task-0"]
    await store.expire(10.0)
    with pytest.raises(StoreConflict, match="attempt 1 is over"):
        await store.put_session(making.session("task-1", sample_index=1, attempt=late.attempt))


# Nodes


async def test_nodes_come_go_and_drain(store: Ledger) -> None:
    await store.submit(making.task(num_samples=3), 0.0)
    await store.put_node(making.node("n", version="1"), 0.0)
    assert await store.node_load("n", NodeLoad(run_inflight=2), 1.0)
    assert not await store.node_load("stranger", NodeLoad(), 1.0)
    await _claim(store, 2)
    await store.renew("n", [], 10.0, 4.0)
    (info,) = await store.nodes(5.0)
    assert (info.sessions, info.metrics.run_inflight, info.healthy, info.last_heartbeat) == (2, 2, True, 4.0)
    assert not (await store.nodes(20.0))[0].healthy

    drained = await store.drain("n", 6.0)
    assert drained is not None
    assert drained.draining
    assert await store.drain("stranger", 6.0) is None
    assert await _claim(store, 1) == []
    assert (await store.renew("n", [], 10.0, 7.0)).drain
    await store.put_node(making.node("n", version="1"), 8.0)  # the same process, once more
    assert (await store.nodes(8.0))[0].draining

    await store.expire(100.0)
    await store.renew("n", [], 10.0, 101.0)
    states = [e.state for e in await store.events_after(0) if e.kind == "node"]
    assert states == ["up", "draining", "gone", "up"]


async def test_a_node_that_comes_back_as_another_process_holds_nothing(store: Ledger) -> None:
    await store.submit(making.task(num_samples=2), 0.0)
    await store.put_node(making.node(instance="a"), 0.0)
    before, _ = await _claim(store)
    await store.put_node(making.node(instance="a"), 1.0)
    assert (await store.nodes(1.0))[0].sessions == 2
    await store.drain("n", 1.0)
    await store.put_node(making.node(instance="b"), 2.0)
    (info,) = await store.nodes(2.0)
    assert (info.sessions, info.draining) == (0, False)
    assert (await store.renew("n", [making.held(before)], 10.0, 3.0)).lost == ["task-0"]
    assert [(lease.session_id, lease.attempt) for lease in await _claim(store, now=3.0)] == [
        ("task-0", 2),
        ("task-1", 2),
    ]
