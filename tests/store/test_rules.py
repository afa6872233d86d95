"""What may be written over what: repeats are nothing, contradictions are refused, what is over stays over."""

from __future__ import annotations

import pytest

from polar.contract.task import AgentSpec
from polar.store import Store, StoreConflict
from tests.store import making


async def test_a_task_repeated_with_its_keys_in_another_order_is_the_same_task(store: Store) -> None:
    await store.put_task(making.task(metadata={"a": 1, "b": 2}))
    await store.put_task(making.task(metadata={"b": 2, "a": 1}))
    with pytest.raises(StoreConflict, match="another body"):
        await store.put_task(making.task(agent_timeout_seconds=5.0))
    assert len(await store.tasks()) == 1
    assert (await store.tasks())[0].agent == AgentSpec(harness="codex")


async def test_a_repeated_completion_is_one_completion(store: Store) -> None:
    await store.put_session(making.session())
    await store.put_completion(making.completion())
    await store.put_completion(making.completion())
    assert len(await store.completions("s")) == 1


async def test_a_completion_may_be_repeated_even_after_its_attempt_is_over(store: Store) -> None:
    await store.put_session(making.session())
    await store.put_completion(making.completion())
    await store.put_session(making.session(state="COMPLETED"))
    await store.put_completion(making.completion())
    await store.put_session(making.session(attempt=2))
    await store.put_completion(making.completion())
    assert len(await store.completions("s", attempt=1)) == 1


@pytest.mark.parametrize(
    "change", [{"tokens": 21}, {"outcome": "abandoned"}, {"session_id": "other"}, {"tools": making.large_tools(1)}]
)
async def test_another_completion_under_the_same_id_is_refused(store: Store, change: dict) -> None:
    await store.put_session(making.session())
    await store.put_session(making.session("other"))
    await store.put_completion(making.completion(completion_id="c"))
    with pytest.raises(StoreConflict, match="completion c is stored with other content"):
        await store.put_completion(making.completion(**{"completion_id": "c", **change}))
    assert making.same((await store.completions("s"))[0], making.completion(completion_id="c"))


async def test_two_calls_can_not_take_one_place(store: Store) -> None:
    await store.put_session(making.session())
    await store.put_completion(making.completion(seq=3))
    with pytest.raises(StoreConflict, match="another call at seq 3"):
        await store.put_completion(making.completion(seq=3, completion_id="late"))


async def test_a_completion_that_builds_on_what_its_attempt_does_not_have_is_refused(store: Store) -> None:
    for name in ("s", "other"):
        await store.put_session(making.session(name))
        await store.put_completion(making.completion(name))
    for base in ("nowhere", "other-0"):
        with pytest.raises(StoreConflict, match=f"completion s-1 builds on {base}, which is not stored"):
            await store.put_completion(making.completion(seq=1, base_id=base))
    await store.put_completion(making.completion(seq=1, base_id="s-0"))
    assert [each.base_id for each in await store.completions("s")] == [None, "s-0"]


async def test_a_completion_of_an_unknown_session_is_refused(store: Store) -> None:
    with pytest.raises(StoreConflict, match="session s is not stored"):
        await store.put_completion(making.completion())


@pytest.mark.parametrize("state", ["COMPLETED", "ERROR", "TIMEOUT"])
async def test_a_call_that_comes_after_the_session_ended_is_refused(store: Store, state: str) -> None:
    await store.put_session(making.session(state=state))
    with pytest.raises(StoreConflict, match=state):
        await store.put_completion(making.completion())
    assert await store.completions("s") == []


@pytest.mark.parametrize("attempt", [1, 3])
async def test_a_call_of_another_attempt_than_the_current_is_refused(store: Store, attempt: int) -> None:
    await store.put_session(making.session(attempt=2))
    with pytest.raises(StoreConflict, match="at attempt 2"):
        await store.put_completion(making.completion(attempt=attempt))


async def test_completions_are_those_of_the_newest_attempt_unless_one_is_named(store: Store) -> None:
    await store.put_session(making.session())
    for seq in (2, 0, 1):
        await store.put_completion(making.completion(seq=seq))
    await store.put_session(making.session(attempt=2))
    assert await store.completions("s") == []
    await store.put_completion(making.completion(seq=0, attempt=2, completion_id="again"))
    assert [c.completion_id for c in await store.completions("s")] == ["again"]
    assert [c.seq for c in await store.completions("s", attempt=1)] == [0, 1, 2]
    assert await store.completions("s", attempt=3) == []
    assert await store.completions("unknown") == []


async def test_a_session_moves_on_until_it_has_ended(store: Store) -> None:
    for state in ("REGISTERED", "RUNNING", "EVALUATING", "TIMEOUT"):
        await store.put_session(making.session(state=state, updated_at=9.0))
    ended = making.session(state="TIMEOUT", updated_at=9.0)
    await store.put_session(ended)  # the very same record, once more
    for late in (making.session(state="RUNNING"), making.session(state="COMPLETED")):
        with pytest.raises(StoreConflict, match="ended as TIMEOUT"):
            await store.put_session(late)
    assert await store.session("s") == ended
    await store.put_session(making.session(state="RUNNING", attempt=2))
    with pytest.raises(StoreConflict, match="attempt 1 is over"):
        await store.put_session(making.session(state="RUNNING", attempt=1))
    assert await store.session("s") == making.session(state="RUNNING", attempt=2)


@pytest.mark.parametrize("moved", [{"task_id": "other"}, {"sample_index": 1}])
async def test_a_session_stays_with_its_task_and_sample(store: Store, moved: dict) -> None:
    await store.put_session(making.session())
    with pytest.raises(StoreConflict, match="is sample 0 of task task"):
        await store.put_session(making.session(attempt=2, **moved))


async def test_an_attempt_has_one_result(store: Store) -> None:
    ended = making.session(state="COMPLETED")
    await store.finish_session(ended, making.result())
    await store.finish_session(ended, making.result(traces=1))
    with pytest.raises(StoreConflict, match="finished with another result"):
        await store.finish_session(ended, making.result(timing={"run": 9.0}))
    with pytest.raises(StoreConflict, match="ended as COMPLETED"):
        await store.finish_session(making.session(state="COMPLETED", error="e"), making.result())
    assert await store.results() == [making.result()]
    assert await store.session("s") == ended


async def test_a_refused_finish_leaves_neither_state_nor_result(store: Store) -> None:
    await store.put_session(making.session(attempt=2))
    with pytest.raises(StoreConflict, match="attempt 1 is over"):
        await store.finish_session(making.session(state="COMPLETED"), making.result())
    assert await store.results() == []
    assert await store.session("s") == making.session(attempt=2)


async def test_a_session_that_must_be_there_is_not_made_by_its_end(store: Store) -> None:
    ended = making.session(state="COMPLETED")
    with pytest.raises(StoreConflict, match="forgotten"):
        await store.finish_session(ended, making.result(), stored=True)
    assert (await store.sessions(), await store.results()) == ([], [])
    await store.put_session(making.session())
    await store.finish_session(ended, making.result(), stored=True)
    assert await store.session("s") == ended


async def test_an_attempt_that_ended_without_a_result_gets_none_later(store: Store) -> None:
    ended = making.session(state="COMPLETED")
    await store.put_session(ended)
    with pytest.raises(StoreConflict, match="ended as COMPLETED already"):
        await store.finish_session(ended, making.result())
    assert await store.results() == []


async def test_each_finished_attempt_has_its_result(store: Store) -> None:
    first = making.result(status="ERROR")
    await store.finish_session(making.session(state="ERROR"), first)
    second = making.result(attempt=2)
    await store.finish_session(making.session(state="COMPLETED", attempt=2), second)
    assert [(r.attempt, r.status) for r in await store.results("task")] == [(1, "ERROR"), (2, "COMPLETED")]


@pytest.mark.parametrize(
    "change", [{"state": "RUNNING"}, {"state": "ERROR"}, {"attempt": 2}, {"task_id": "x"}, {"session_id": "x"}]
)
async def test_a_record_and_a_result_that_disagree_are_a_mistake(store: Store, change: dict) -> None:
    with pytest.raises(ValueError, match="session"):
        await store.finish_session(making.session(**{"state": "COMPLETED", **change}), making.result())
    assert await store.sessions() == []
