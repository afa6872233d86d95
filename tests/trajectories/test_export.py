"""Traces in files: what a trainer reads is what was captured, and a file is there whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Image, Message, Text, Tool, ToolCall
from polar.contract.errors import UsageError
from polar.contract.result import SessionResult, Trace
from polar.trajectories import parquet
from polar.trajectories.export import Format, NoRows, export

from .making import result, trace

CALL = Message("assistant", "", reasoning="hm", tool_calls=(ToolCall("t1", "bash", '{"cmd": "ls"}'),))
SHOWN = Message("tool", (Text("see"), Image("https://example.test/a.png")), tool_call_id="t1")
RICH = {
    "response_messages": (CALL, SHOWN, Message("assistant", "done")),
    "tools": (Tool("bash", "runs", {"type": "object"}), Tool("stop")),
    "images": ("https://example.test/a.png",),
}


def some_results() -> list[SessionResult]:
    return [
        result(trace(reward=1.0, **RICH), trace(role="auxiliary"), group_id="g", harness="codex"),
        result(trace(reward=0.0), session_id="s2"),
        result(session_id="s3"),
    ]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parquet_reads_as_a_dataset_with_the_types_of_the_contract(tmp_path: Path) -> None:
    from datasets import List, Value, load_dataset

    path = tmp_path / "out" / "traces.parquet"
    assert export(some_results(), path, "parquet") == 3
    data = load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"), split="train")
    for name, kind in (
        ("prompt_ids", "int32"),
        ("response_ids", "int32"),
        ("loss_mask", "int8"),
        ("response_logprobs", "float32"),
        ("weight_versions", "int32"),
        ("completion_ids", "string"),
        ("images", "string"),
    ):
        assert data.features[name] == List(Value(kind))
    row = data[0]
    assert row["prompt_ids"] == [1, 2]
    assert row["response_ids"] == [3, 4, 5]
    assert row["loss_mask"] == [1, 0, 1]
    assert row["response_logprobs"] == [-0.5, 0.0, -0.25]
    assert row["weight_versions"] == [7, -1, 8]
    assert row["completion_ids"] == ["c0", "c1"]
    assert json.loads(row["metadata"])["context_exact"] is True
    plain = ("task_id", "session_id", "attempt", "trace_index", "group_id", "reward", "role", "harness", "model")
    assert [data[0][name] for name in plain] == ["t1", "s1", 2, 0, "g", 1.0, "main", "codex", "used"]
    assert [data[1][name] for name in plain] == ["t1", "s1", 2, 1, "g", None, "auxiliary", "codex", "used"]
    assert [data[2][name] for name in plain] == ["t1", "s2", 2, 0, "t1", 0.0, "main", None, "used"]
    assert (row["status"], row["finish_reason"]) == ("COMPLETED", "stop")


def test_messages_and_tools_are_in_chat_form(tmp_path: Path) -> None:
    export(some_results(), tmp_path / "t.parquet", "parquet")
    row = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]
    assert json.loads(row["prompt_messages"]) == [{"role": "user", "content": "hi"}]
    assert json.loads(row["response_messages"]) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}
            ],
        },
        {
            "role": "tool",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://example.test/a.png"}},
            ],
            "tool_call_id": "t1",
        },
        {"role": "assistant", "content": "done"},
    ]
    described, bare = json.loads(row["tools"])
    assert described == {
        "type": "function",
        "function": {"name": "bash", "description": "runs", "parameters": {"type": "object"}},
    }
    assert bare["function"]["name"] == "stop"


def test_json_lines_have_the_keys_and_values_of_parquet(tmp_path: Path) -> None:
    export(some_results(), tmp_path / "t.parquet", "parquet")
    assert export(some_results(), tmp_path / "t.jsonl", "jsonl") == 3
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    for row, line in zip(table, lines(tmp_path / "t.jsonl"), strict=True):
        for name in ("prompt_messages", "response_messages", "tools", "metadata"):
            row[name] = json.loads(row[name])
        assert line == row


def test_sft_has_main_conversations_only(tmp_path: Path) -> None:
    assert export(some_results(), tmp_path / "t.jsonl", "sft", where="reward >= 1") == 1
    (line,) = lines(tmp_path / "t.jsonl")
    assert set(line) == {"messages", "tools", "text_only"}
    assert line["text_only"] is False
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "tool", "assistant"]  # type: ignore[index,attr-defined]
    assert export(some_results(), tmp_path / "all.jsonl", "sft") == 2


def test_where_chooses_rows(tmp_path: Path) -> None:
    assert export(some_results(), tmp_path / "t.jsonl", "jsonl", where='role == "main" and reward > 0') == 1
    assert [line["reward"] for line in lines(tmp_path / "t.jsonl")] == [1.0]


def test_a_bad_where_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="columns:"):
        export(some_results(), tmp_path / "t.parquet", "parquet", where="rewrad > 1")
    assert list(tmp_path.iterdir()) == []


def test_hf_is_a_folder_that_loads_by_its_name(tmp_path: Path) -> None:
    from datasets import load_dataset

    folder = tmp_path / "traces"
    assert export(some_results(), folder, "hf") == 3
    data = load_dataset(str(folder), cache_dir=str(tmp_path / "cache"), split="train")
    assert data["reward"][:] == [1.0, None, 0.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "traces"]
    with pytest.raises(UsageError, match="already there"):
        export(some_results(), folder, "hf")


def test_no_rows_are_still_a_file_with_all_columns(tmp_path: Path) -> None:
    assert export([], tmp_path / "t.parquet", "parquet") == 0
    assert pq.read_table(tmp_path / "t.parquet").schema.equals(parquet.SCHEMA)
    with pytest.raises(NoRows, match="there is no trace"):
        export([], tmp_path / "new.parquet", "parquet", may_be_empty=False)
    assert not (tmp_path / "new.parquet").exists()


def test_no_row_is_said_with_its_reason(tmp_path: Path) -> None:
    def why(*traces: Trace, to: Format = "jsonl", where: str | None = None) -> str:
        with pytest.raises(NoRows) as caught:
            export([result(*traces)], tmp_path / "t.jsonl", to, where, may_be_empty=False)
        return str(caught.value)

    unscored = [trace(role="main"), trace(role="main")]
    assert why(*unscored, where="reward >= 1").endswith("reward is empty in all 2 traces")
    assert "side call" in why(trace(role="auxiliary"), to="sft")
    assert "holds for none of 2 traces" in why(*unscored, where='role == "subagent"')


def test_row_groups_stay_small_so_that_no_run_must_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "TOKENS_PER_GROUP", 12)
    alive: list[int] = []

    def many() -> Iterator[SessionResult]:
        for index in range(7):
            alive.append(index)
            yield result(trace(prompt_ids=ids([index, index])), session_id=f"s{index}")

    assert export(many(), tmp_path / "t.parquet", "parquet") == 7
    file = pq.ParquetFile(tmp_path / "t.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 3, 1]
    assert file.read()["prompt_ids"].to_pylist() == [[i, i] for i in range(7)]


@pytest.mark.parametrize("to", ["parquet", "jsonl", "sft", "hf"])
def test_a_broken_export_leaves_the_old_file_and_no_pieces(tmp_path: Path, to: str) -> None:
    path = tmp_path / "t"
    if to != "hf":
        path.write_text("old")

    def breaks() -> Iterator[SessionResult]:
        yield from some_results()
        raise RuntimeError("the store went away")

    with pytest.raises(RuntimeError, match="went away"):
        export(breaks(), path, to)  # type: ignore[arg-type]
    assert [p.read_text() for p in tmp_path.iterdir()] == ([] if to == "hf" else ["old"])


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="parquet, jsonl, sft, hf"):
        export([], tmp_path / "t.csv", "csv")  # type: ignore[arg-type]


def test_a_group_may_be_number_zero(tmp_path: Path) -> None:
    export([result(trace(), group_id=0)], tmp_path / "t.jsonl", "jsonl")
    assert lines(tmp_path / "t.jsonl")[0]["group_id"] == "0"


def test_the_harness_name_is_found_where_the_session_keeps_it(tmp_path: Path) -> None:
    session = result(trace())
    session.trajectory.metadata["provenance"] = {"harness": {"name": "mini", "version": "1"}}
    export([session], tmp_path / "t.jsonl", "jsonl")
    assert lines(tmp_path / "t.jsonl")[0]["harness"] == "mini"
