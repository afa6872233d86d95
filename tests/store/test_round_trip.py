"""What goes into the store comes out of it, exactly, and takes about the room of what was new."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.contract.chat import Message
from polar.contract.completion import Completion
from polar.store import Store, open_store
from polar.store.codec import HEAD_FIELDS, CompletionReader, encode_completion
from tests.store import making
from tests.store.postgres_server import Server

EMPTY = 14 * 16_384
"""Bytes of a store with nothing in it: a page for each table and index."""


@given(making.completions)
def test_any_completion_survives_the_codec(completion: Completion) -> None:
    row, shared = encode_completion(completion)
    back = CompletionReader(shared.__getitem__).decode(
        completion.completion_id, completion.session_id, completion.attempt, completion.seq, row
    )
    assert making.same(back, completion)


some_completions = st.lists(making.completions, min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(some_completions)
async def test_any_completions_survive_a_closed_and_reopened_file(completions: list[Completion]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await _survive(f"sqlite:///{folder}/polar.db", completions)


@settings(max_examples=15, deadline=None)
@given(some_completions)
async def test_any_completions_survive_in_postgresql(postgres_server: Server, completions: list[Completion]) -> None:
    try:
        await _survive(postgres_server.url(), completions)
    finally:
        postgres_server.clean()


async def _survive(url: str, completions: list[Completion]) -> None:
    given = [
        msgspec.structs.replace(c, session_id="s", completion_id=f"c{i}", attempt=1, seq=i)
        for i, c in enumerate(completions)
    ]
    store = open_store(url)
    await store.open()
    await store.put_session(making.session())
    for completion in given:  # on one that is there
        completion.base_id = None if completion.base_id is None or completion is given[0] else "c0"
    for completion in given:
        await store.put_completion(completion)
    await store.close()
    store = open_store(url)
    await store.open()
    back = await store.completions("s")
    await store.close()
    assert len(back) == len(given)
    assert all(making.same(a, b) for a, b in zip(back, given, strict=True))


def test_no_field_of_a_completion_is_forgotten() -> None:
    columns = {"completion_id", "session_id", "attempt", "seq", "messages", "tools"}
    arrays = {"prompt_delta", "response_ids", "logprobs"}
    assert set(HEAD_FIELDS) | columns | arrays == set(Completion.__struct_fields__)


async def test_what_a_write_keeps_is_what_it_was_given_at_the_call(store: Store) -> None:
    record = making.session(metadata={"step": 1})
    await store.put_session(record)
    completion = making.completion(response_ids=np.array([1, 2, 3], dtype=np.int32))
    writing = store.put_completion(completion)
    writing.send(None)  # the call is made and queued
    completion.response_ids[:] = 0
    completion.seq = 7
    record.metadata["step"] = 2
    writing.close()
    await store.put_completion(making.completion(seq=1))
    stored = await store.completions("s")
    assert [c.seq for c in stored] == [0, 1]
    assert stored[0].response_ids.tolist() == [1, 2, 3]
    session = await store.session("s")
    assert session is not None
    assert session.metadata == {"step": 1}


def test_arrays_of_another_type_are_refused_and_not_cast() -> None:
    with pytest.raises(ValueError, match="int64"):
        encode_completion(making.completion(response_ids=np.array([2**40])))


async def test_a_large_tools_list_is_kept_once_however_many_calls_carry_it(
    sqlite_store: Store, tmp_path: Path
) -> None:
    tools = making.large_tools(30)
    for name in ("a", "b"):
        await sqlite_store.put_session(making.session(name))
        for seq in range(50):
            await sqlite_store.put_completion(making.completion(name, seq, tools=tools))
    stored = await sqlite_store.completions("b")
    await sqlite_store.close()
    assert all(completion.tools == tools for completion in stored)
    assert (tmp_path / "polar.db").stat().st_size < 30_000 + 100 * 2_000 + EMPTY


async def test_samples_of_a_task_share_their_first_prompt(sqlite_store: Store, tmp_path: Path) -> None:
    system = Message(role="system", content="rules " * 5_000)
    prompt = np.arange(10_000, dtype=np.int32)
    for i in range(16):
        await sqlite_store.put_session(making.session(f"s{i}", sample_index=i))
        await sqlite_store.put_completion(making.completion(f"s{i}", messages=(system,), prompt_delta=prompt))
    stored = await sqlite_store.completions("s7")
    await sqlite_store.close()
    assert stored[0].messages == (system,)
    assert stored[0].prompt_delta.tolist() == prompt.tolist()
    assert (tmp_path / "polar.db").stat().st_size < 2 * (30_000 + 40_000) + EMPTY


async def test_a_session_grows_with_its_tokens(sqlite_store: Store, tmp_path: Path) -> None:
    await sqlite_store.put_session(making.session())
    for seq in range(200):
        await sqlite_store.put_completion(making.completion(seq=seq, tokens=500))
    await sqlite_store.close()
    new_bytes = 200 * (500 * 4 * 3 + 400)
    assert (tmp_path / "polar.db").stat().st_size < 1.5 * new_bytes


async def test_tasks_sessions_and_results_come_back_in_their_order(store: Store) -> None:
    await store.put_task(making.task("later-name", metadata={"group_id": "g"}))
    await store.put_task(making.task("earlier-name"))
    for task_id, sample in (("earlier-name", 0), ("later-name", 1), ("later-name", 0), ("bare", 0)):
        await store.put_session(making.session(f"{task_id}-{sample}", task_id=task_id, sample_index=sample))
    for name, task_id in (("later-name-1", "later-name"), ("earlier-name-0", "earlier-name")):
        ended = making.session(name, task_id=task_id, sample_index=int(name[-1]), state="COMPLETED")
        await store.finish_session(ended, making.result(name, task_id=task_id, traces=2))

    assert [t.task_id for t in await store.tasks()] == ["later-name", "earlier-name"]
    assert await store.task("later-name") == making.task("later-name", metadata={"group_id": "g"})
    assert await store.task("missing") is None
    assert await store.session("missing") is None
    ordered = ["later-name-0", "later-name-1", "earlier-name-0", "bare-0"]
    assert [s.session_id for s in await store.sessions()] == ordered
    assert [s.session_id for s in await store.sessions("later-name")] == ordered[:2]
    assert [r.session_id for r in await store.results()] == ["later-name-1", "earlier-name-0"]
    assert await store.results("earlier-name") == [making.result("earlier-name-0", task_id="earlier-name")]


async def test_a_result_is_kept_without_traces_and_the_callers_own_keeps_them(store: Store) -> None:
    result = making.result(traces=2)
    await store.finish_session(making.session(state="COMPLETED"), result)
    assert len(result.trajectory.traces) == 2
    assert await store.results() == [making.result(traces=0)]


async def test_an_error_with_half_a_character_is_kept(store: Store) -> None:
    record = making.session(state="ERROR", error="stderr: \udcff and \ud83d")
    await store.put_session(record)
    assert await store.session("s") == record
