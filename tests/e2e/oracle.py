"""What must hold of every results folder, checked against what the engine itself wrote down: each trained
token stands behind exactly the ids that were in context when it was sampled, with the engine's own logprob, and
each generation is one completion with one fate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from polar.contract.completion import Completion
from polar.contract.result import SessionResult
from polar.results import open_folder, rebuild
from polar.store.base import SessionRecord

Generation = dict[str, Any]


@dataclass
class Folder:
    """A results folder, read back from its store. ``completions`` has every attempt."""

    path: Path
    report: dict[str, Any]
    sessions: dict[str, SessionRecord]
    results: dict[str, SessionResult]
    completions: list[Completion] = field(default_factory=list)

    def of(self, session: str, attempt: int) -> list[Completion]:
        return [each for each in self.completions if (each.session_id, each.attempt) == (session, attempt)]


def read_folder(path: Path) -> Folder:
    return asyncio.run(read_folder_async(path))


async def read_folder_async(path: Path) -> Folder:
    store = await open_folder(path)
    try:
        sessions = {each.session_id: each for each in await store.sessions()}
        results = {each.session_id: await rebuild(store, each) for each in await store.results()}
        folder = Folder(path, json.loads((path / "report.json").read_text()), sessions, results)
        for session in sessions.values():
            for attempt in range(1, session.attempt + 1):
                folder.completions += await store.completions(session.session_id, attempt)
        return folder
    finally:
        await store.close()


def check_folder(folder: Folder) -> None:
    """The files are all there, say the same, and account for everything; every session has ended."""
    names = {path.name for path in folder.path.iterdir()}
    assert {"polar.db", "report.json", "results.jsonl", "traces.parquet"} <= names
    assert not [name for name in names if name.endswith((".part", ".partial"))], "half a file"
    assert all(each.state in ("COMPLETED", "ERROR", "TIMEOUT") for each in folder.sessions.values())
    assert set(folder.results) == set(folder.sessions)
    lines = [json.loads(line) for line in (folder.path / "results.jsonl").read_text().splitlines()]
    assert sorted(line["session_id"] for line in lines) == sorted(folder.sessions)
    _check_report(folder, lines)
    rows = pq.read_table(folder.path / "traces.parquet").to_pylist()
    traces = [trace for line in lines for trace in line["trajectory"]["traces"]]
    assert [row["response_ids"] for row in rows] == [trace["response_ids"] for trace in traces]
    for result in folder.results.values():
        check_accounts(result, folder.of(result.session_id, result.attempt))


def _check_report(folder: Folder, lines: list[dict[str, Any]]) -> None:
    report = folder.report
    assert sum(task["requested"] for task in report["tasks"].values()) == len(lines) == report["sessions"]["ended"]
    assert report["sessions"]["unfinished"] == 0
    older = [each for each in folder.completions if each.attempt < folder.sessions[each.session_id].attempt]
    assert sum(report["completions"].values()) == len(folder.completions)
    assert report["completions"].get("cut_off", 0) == len(older)
    assert report["traces"] == sum(len(line["trajectory"]["traces"]) for line in lines)
    masks = [sum(trace["loss_mask"]) for line in lines for trace in line["trajectory"]["traces"]]
    assert report["tokens_trained"] == sum(masks)


def check_accounts(result: SessionResult, completions: list[Completion]) -> None:
    """Every completion has one fate; those trained are in one trace, the others in none."""
    fates = result.trajectory.metadata["reconstruction"]["completions"]
    told = [name for names in fates.values() for name in names]
    assert sorted(told) == sorted(each.completion_id for each in completions)
    trained = [name for trace in result.trajectory.traces for name in trace.completion_ids]
    assert sorted(trained) == sorted([*fates.get("trained", []), *fates.get("auxiliary", [])])
    assert all(trace.role != "auxiliary" or trace.reward is None for trace in result.trajectory.traces)


def check_against(
    generations: Iterable[Generation], completions: list[Completion], results: Iterable[SessionResult]
) -> None:
    """``completions`` and the traces of ``results`` against the engine's log of exactly these calls."""
    by_id = {each["request_id"]: each for each in generations}
    kept = {each.completion_id for each in completions if each.outcome == "ok"}
    assert kept <= set(by_id) <= {each.completion_id for each in completions}, "one generation, one completion"
    for completion in completions:
        if completion.completion_id not in by_id:  # given up before the engine began, or before it has taken notice
            continue
        generation = by_id[completion.completion_id]
        # Of a call that was given up the engine may have got further than what arrived of it.
        arrived = slice(len(completion.response_ids) if completion.outcome != "ok" else None)
        assert completion.response_ids.tolist() == generation["sampled_ids"][arrived]
        assert completion.logprobs.tolist() == generation["logprobs"][arrived]
    for result in results:
        for trace in result.trajectory.traces:
            _check_trace(trace, by_id)


def _check_trace(trace: Any, by_id: dict[str, Generation]) -> None:
    full = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    mask = np.zeros(len(trace.response_ids), dtype=np.int32)
    logprobs = np.zeros(len(trace.response_ids), dtype=np.float32)
    for name in trace.completion_ids:
        generation = by_id[name]
        context, sampled = generation["context_ids"], generation["sampled_ids"]
        end = len(context) + len(sampled)
        assert full[:end] == context + sampled, "a trained token stands behind another context than the engine's"
        span = slice(len(context) - len(trace.prompt_ids), end - len(trace.prompt_ids))
        assert span.start >= 0
        assert not mask[span].any(), "a token is trained twice"
        mask[span], logprobs[span] = 1, generation["logprobs"]
    assert trace.loss_mask.tolist() == mask.tolist()
    assert trace.response_logprobs.tolist() == logprobs.tolist()
