"""A node's journal: it knows what it has not handed over, across restarts, and a ledger takes it in any order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from polar.contract.rollout import Delivery
from polar.store import Ledger, SQLiteJournal
from tests.store import making


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    journal = SQLiteJournal(tmp_path / "journal.db")
    await journal.open()
    yield journal
    await journal.close()


async def test_what_was_kept_is_handed_over_until_it_is_marked(journal: SQLiteJournal) -> None:
    await journal.put_session(making.session("b"))
    await journal.put_session(making.session("a"))
    for name, seq in (("a", 1), ("b", 0), ("a", 0)):
        await journal.put_completion(making.completion(name, seq))
    assert [c.completion_id for c in await journal.unshipped(10)] == ["b-0", "a-0", "a-1"]
    assert making.same((await journal.unshipped(1))[0], making.completion("b", 0))
    await journal.shipped(["b-0", "a-1", "unknown"])
    await journal.shipped(["b-0"])
    assert [c.completion_id for c in await journal.unshipped(10)] == ["a-0"]
    await journal.put_completion(making.completion("b", 0))  # written again, not handed over again
    assert [c.completion_id for c in await journal.unshipped(10)] == ["a-0"]


async def test_results_are_handed_over_until_they_are_marked(journal: SQLiteJournal) -> None:
    for name in ("x", "y"):
        await journal.finish_session(making.session(name, state="COMPLETED"), making.result(name))
    assert await journal.undelivered() == [making.result("x"), making.result("y")]
    await journal.delivered("x", 2)
    await journal.delivered("x", 1)
    await journal.finish_session(making.session("x", state="COMPLETED"), making.result("x"))
    assert [r.session_id for r in await journal.undelivered()] == ["y"]


async def test_what_was_refused_for_good_is_set_aside_with_its_reason(journal: SQLiteJournal, tmp_path: Path) -> None:
    await journal.put_session(making.session())
    for seq in range(3):
        await journal.put_completion(making.completion(seq=seq))
    await journal.finish_session(making.session(state="COMPLETED"), making.result())
    await journal.set_aside({"s-2": "too large", "s-1": "cut \udcff"})
    assert [c.completion_id for c in await journal.unshipped(10)] == ["s-0"]
    assert await journal.refused("s", 2) == {}
    await journal.set_result_aside("s", 1, "not valid")
    assert await journal.undelivered() == []
    await journal.close()
    again = SQLiteJournal(tmp_path / "journal.db")
    await again.open()
    assert list((await again.refused("s", 1)).items()) == [("s-1", "cut \udcff"), ("s-2", "too large")]
    assert [c.completion_id for c in await again.completions("s")] == ["s-0", "s-1", "s-2"]
    await again.close()


async def test_a_journal_that_was_cut_off_goes_on_where_it_was(journal: SQLiteJournal, tmp_path: Path) -> None:
    await journal.put_session(making.session())
    await journal.put_completion(making.completion(seq=0))
    await journal.put_completion(making.completion(seq=1))
    await journal.finish_session(making.session(state="COMPLETED"), making.result())
    await journal.shipped(["s-0"])
    await journal.close()
    again = SQLiteJournal(tmp_path / "journal.db")
    await again.open()
    assert [c.completion_id for c in await again.unshipped(10)] == ["s-1"]
    assert [r.session_id for r in await again.undelivered()] == ["s"]
    await again.close()


async def test_nothing_is_forgotten_before_it_is_handed_over(journal: SQLiteJournal) -> None:
    await journal.put_task(making.task(callback_url="http://t"))
    await journal.put_session(making.session())
    await journal.put_completion(making.completion())
    await journal.finish_session(making.session(state="COMPLETED"), making.result())
    assert (await journal.purge(100.0)).sessions == 0
    await journal.shipped(["s-0"])
    assert (await journal.purge(100.0)).sessions == 0
    await journal.delivered("s", 1)
    assert await journal.purge(100.0) == (1, 1, 1)


async def test_what_was_handed_over_is_forgotten_whether_it_ended_here_or_was_cut_off(journal: SQLiteJournal) -> None:
    tools = making.large_tools()
    for sample, name in enumerate(("ended", "cut", "kept", "held", "new", "aside")):
        late = {"updated_at": 200.0} if name == "new" else {}
        record = making.session(name, sample_index=sample, task_id="other" if name == "cut" else "task", **late)
        await journal.put_session(record)
        await journal.put_completion(making.completion(name, tools=tools))
    for task in ("task", "other"):
        await journal.put_task(making.task(task))
    await journal.finish_session(making.session("ended", state="COMPLETED"), making.result("ended"))
    handed = [f"{name}-0" for name in ("ended", "cut", "held", "new")]
    await journal.shipped(handed)
    assert await journal.forget_handed_over(100.0, {"held"}, aside=True) == (1, 1, 1), "cut, with its task"
    await journal.delivered("ended", 1)
    await journal.set_aside({"aside-0": "too large"})
    assert await journal.forget_handed_over(100.0, {"held"}, aside=False) == (0, 1, 1), "ended"
    assert await journal.forget_handed_over(100.0, {"held"}, aside=True) == (0, 1, 1), "what was set aside"
    assert [s.session_id for s in await journal.sessions()] == ["kept", "held", "new"]
    assert [t.task_id for t in await journal.tasks()] == ["task"]
    # What has come since into the places of the forgotten is handed over as it should be.
    await journal.put_session(making.session("aside", sample_index=5, attempt=2))
    await journal.put_completion(making.completion("aside", attempt=2))
    assert [c.completion_id for c in await journal.unshipped(10)] == ["kept-0", "aside-0"]
    assert (await journal.completions("held"))[0].tools == tools


async def test_a_result_that_was_set_aside_is_kept_unless_it_may_go(journal: SQLiteJournal) -> None:
    await journal.put_session(making.session())
    await journal.finish_session(making.session(state="COMPLETED"), making.result())
    await journal.set_result_aside("s", 1, "too large")
    assert await journal.forget_handed_over(100.0, (), aside=False) == (0, 0, 0)
    assert await journal.result("s", 1) is not None
    assert await journal.forget_handed_over(100.0, (), aside=True) == (0, 1, 0)


async def test_a_ledger_takes_what_a_journal_hands_over(journal: SQLiteJournal, store: Ledger) -> None:
    await store.submit(making.task(), 0.0)
    (lease,) = await store.claim("n", 1, 10.0, 0.0)
    record = making.session(lease.session_id, updated_at=1.0)
    await journal.put_session(record)
    for seq in range(3):
        await journal.put_completion(making.completion("task-0", seq))
    ended = msgspec.structs.replace(record, state="COMPLETED", updated_at=2.0)
    await journal.finish_session(ended, making.result("task-0"))

    (result,) = await journal.undelivered()
    await store.deliver("n", Delivery(session_id="task-0", attempt=1, result=result), 3.0)
    while calls := await journal.unshipped(2):
        await store.deliver("n", Delivery(session_id="task-0", attempt=1, completions=calls), 4.0)
        await journal.shipped([c.completion_id for c in calls])
    assert [making.same(*pair) for pair in zip(
        await store.completions("task-0"), await journal.completions("task-0"), strict=True
    )] == [True] * 3  # fmt: skip
    assert await store.results() == await journal.results()
