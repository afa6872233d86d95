"""A finished results folder: what is in it, how it is shown, exported and left alone."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cli.making import Done, Forked, ScriptedProcess, agent, environment, refused, run, start, task, write

TURNS, SAMPLES = 3, 2
SHELL = {"harness": "shell", "custom_shell": {"command": agent(TURNS)}}


@pytest.fixture(scope="module")
def finished(polar: Forked, engine: ScriptedProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder of ``SAMPLES`` sessions with ``TURNS`` calls each, and a task whose agent broke."""
    here = tmp_path_factory.mktemp("finished")
    good = task(agent=SHELL, num_samples=SAMPLES, metadata={"group_id": "g7"})
    bad = task("broken", agent={"harness": "shell", "custom_shell": {"command": agent(1, "; exit 9")}})
    files = [write(here, good, "good.yaml"), write(here, bad, "bad.yaml")]
    line = ["run", *files, "--out", here / "out", "--json", "--engine", "openai", "--engine-url", engine.url]
    return here / "out", polar(line, here)


@pytest.fixture
def folder(finished: tuple[Path, Done]) -> Path:
    return finished[0]


def test_json_is_the_report_and_nothing_else_is_said(finished: tuple[Path, Done]):
    folder, done = finished
    assert (done.code, done.err) == (1, ""), "a session failed"
    report = done.json
    assert report.pop("folder") == str(folder)
    assert report == json.loads((folder / "report.json").read_text())
    assert report["sessions"] == {"ended": 3, "unfinished": 0, "COMPLETED": 2, "ERROR": 1}
    assert report["tasks"]["t"] == {"requested": SAMPLES, "rewards": [1.0] * SAMPLES}
    assert report["completions"] == {"trained": TURNS * SAMPLES + 1}
    assert (report["traces"], report["merge_factor"]) == (3, pytest.approx((TURNS * SAMPLES + 1) / 3))
    assert list(report["errors"]) == ["the agent's command ended with exit code 9: " + _last_words(folder)]


def _last_words(folder: Path) -> str:
    return (folder / "sessions/broken-0/attempt-1/agent.stdout").read_text().strip()


def test_the_folder_is_whole(folder: Path):
    assert sorted(path.name for path in folder.iterdir()) == [
        "polar.db", "report.json", "results.jsonl", "sessions", "traces.parquet",
    ]  # fmt: skip
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert sorted(result["session_id"] for result in results) == ["broken-0", "t-0", "t-1"]
    rows = pq.read_table(folder / "traces.parquet").to_pylist()
    assert {(row["group_id"], row["reward"], row["role"]) for row in rows} == {
        ("g7", 1.0, "main"), ("broken", None, "main"),
    }  # fmt: skip


def test_run_again_runs_nothing_again(polar: Forked, engine: ScriptedProcess, folder: Path):
    calls = len(engine.generations())
    results = (folder / "results.jsonl").read_bytes()
    files = [folder.parent / "good.yaml", folder.parent / "bad.yaml"]
    done = polar(["run", *files, "--out", folder, "--engine", "openai", "--engine-url", engine.url], folder)
    assert done.code == 1
    assert len(engine.generations()) == calls
    assert (folder / "results.jsonl").read_bytes() == results


# ---- show ------------------------------------------------------------------------------------------------


def test_sessions_are_listed_on_a_dumb_terminal(folder: Path):
    done = run(["show", folder], folder, env=_terminal("dumb"))
    assert (done.code, done.err) == (0, "")
    _plain(done.out)
    failed = r"broken-0 +ERROR +- +1 +1 +the agent's command ended with exit.*…"
    for line in (r"t-0 +COMPLETED +1 +3 +1", r"t-1 +COMPLETED +1 +3 +1", failed):
        assert re.search(line, done.out), done.out


def test_nothing_is_cut_in_a_pipe(folder: Path):
    listed = run(["show", folder], folder)
    (failed,) = [line for line in listed.out.splitlines() if line.startswith("broken-0")]
    assert "…" not in failed
    assert "exit code" in failed
    shown = run(["show", folder, "t-1"], folder)
    assert any("sampling" in line and line.startswith("warning: ") for line in shown.out.splitlines()), shown.out
    assert max(map(len, shown.out.splitlines())) < 1000, "and nothing is filled up"
    heads = [line for line in listed.out.splitlines() if line.startswith("session")]
    assert [line.split()[-1] for line in heads] == ["error"]
    assert not [line for line in listed.out.splitlines() if line.endswith(" ")]


def test_a_session_is_shown_turn_by_turn_on_a_dumb_terminal(folder: Path):
    done = run(["show", folder, "t-1"], folder, env=_terminal("dumb"))
    assert (done.code, done.err) == (0, "")
    _plain(done.out)
    order = [
        "session t-1",
        "COMPLETED",
        "reward: 1",
        "trace 0",
        "user",
        "say hello",
        "assistant",
        "[trained:",
        "reply 0",
        "go on 1",
        "reply 1",
        "go on 2",
        "reply 2",
    ]
    places = [done.out.index(word) for word in order]
    assert places == sorted(places), done.out


def test_tokens_are_shown_with_their_logprobs(polar: Forked, folder: Path):
    shown = polar(["show", folder, "t-0", "--tokens"], folder).out
    assert len(re.findall(r"\b\d+/-\d\.\d\d\b", shown)) == _tokens(folder, "t-0")


def test_a_reader_that_has_seen_enough_is_no_error_worth_a_word(folder: Path):
    with start(["show", folder, "t-0", "--tokens"], folder) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (1, "")


def test_show_as_json_is_a_session_result(polar: Forked, folder: Path):
    result = polar(["show", folder, "t-0", "--json"], folder).json
    assert (result["session_id"], result["status"], len(result["trajectory"]["traces"])) == ("t-0", "COMPLETED", 1)
    lines = polar(["show", folder, "--json"], folder).out.splitlines()
    assert [json.loads(line)["session_id"] for line in lines].count("broken-0") == 1


def test_a_session_is_found_by_its_name_alone_under_results(polar: Forked, folder: Path, here: Path):
    (here / "results").mkdir()
    shutil.copytree(folder, here / "results" / "r")
    assert "session t-1" in polar(["show", "t-1"], here).out
    assert refused(polar(["show", "t-9"], here), 2, "t-9", "results")


def test_what_can_not_be_shown_is_said_in_one_line(polar: Forked, folder: Path, here: Path):
    (here / "empty").mkdir()
    (here / "text").write_text("hello")
    assert refused(polar(["show", "empty"], here), 2, "empty", "no results folder")
    assert refused(polar(["show", "text"], here), 2, "text", "not a database")
    assert refused(polar(["show", folder, "t-9"], here), 2, "t-9", "t-0")
    assert refused(polar(["show", "nowhere"], here), 2, "nowhere")
    assert {path.name for path in here.iterdir()} == {"empty", "text"}
    assert list((here / "empty").iterdir()) == []


def test_what_a_killed_run_left_is_said_to_go_on(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task(agent={"harness": "shell", "custom_shell": {"command": "sleep 1000"}}))
    with start(["run", "task.yaml", "--out", "half", *to_engine], here) as process:
        while not (here / "half/sessions/t-0/attempt-1/agent.stdout").exists():
            assert process.poll() is None
        while_it_runs = polar(["show", "half"], here).out
        process.kill()
    goes_on = "Nothing runs here any more: polar run TASK.yaml --out half goes on"
    assert ("RUNNING" in while_it_runs, goes_on in while_it_runs) == (True, False)
    left = " ".join(polar(["show", "half"], here).out.split())
    assert ("RUNNING" in left, goes_on in left) == (True, True), left


# ---- export ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("to", "name"), [("parquet", "p.parquet"), ("jsonl", "j.jsonl"), ("sft", "s.jsonl"), ("hf", "d")]
)
def test_every_format_with_a_condition_and_another_builder(
    polar: Forked, folder: Path, here: Path, to: str, name: str
):
    line = ["export", folder, "--to", to, "--out", name, "--builder", "per_request", "--where", "reward >= 1"]
    done = polar([*line, "--json"], here)
    assert (done.code, done.err) == (0, "")
    assert done.json == {"path": name, "rows": TURNS * SAMPLES}
    path = here / name / "data/train.parquet" if to == "hf" else here / name
    rows: list[dict[str, Any]]
    if to in ("parquet", "hf"):
        rows = pq.read_table(path).to_pylist()
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == TURNS * SAMPLES
    if to != "sft":
        assert {row["session_id"] for row in rows} == {"t-0", "t-1"}
        assert all(sum(row["loss_mask"]) == len(row["response_ids"]) for row in rows)
    else:
        assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


def test_a_name_is_chosen_where_none_is_given(polar: Forked, folder: Path, here: Path):
    copy = Path(shutil.copytree(folder, here / "copy"))
    done = polar(["export", "copy", "--to", "jsonl"], here)
    assert (done.code, done.out) == (0, "3 rows in copy/export.jsonl\n")
    assert len((copy / "export.jsonl").read_text().splitlines()) == 3


def test_what_can_not_be_exported_is_said_in_one_line(polar: Forked, folder: Path, here: Path):
    export = ["export", folder, "--out", "x"]
    assert refused(polar([*export, "--where", "rewards > 1"], here), 2, "rewards", "reward")
    assert refused(polar([*export, "--where", "reward >"], here), 2, "reward >")
    assert refused(polar([*export, "--where", "__import__('os').system('touch hacked')"], here), 2, "where")
    assert refused(polar([*export, "--to", "csv"], here), 2, "csv", "parquet")
    assert refused(polar([*export, "--builder", "lego"], here), 2, "lego")
    assert refused(polar([*export, "--builder", "per_request", "--builder-config", "{"], here), 2, "JSON")
    assert refused(polar(["export", "nowhere"], here), 2, "nowhere", "no results folder")
    assert list(here.iterdir()) == []
    (here / "taken").mkdir()
    assert refused(polar(["export", folder, "--to", "hf", "--out", "taken"], here), 2, "taken")
    (here / "file").write_text("")
    assert refused(polar(["export", folder, "--out", "file/below.parquet"], here), 2, "file/below.parquet")


@pytest.mark.parametrize("to", ["parquet", "jsonl", "sft", "hf"])
def test_an_export_without_rows_writes_nothing_and_says_why(polar: Forked, folder: Path, here: Path, to: str):
    (here / "good").write_text("from before")
    export = ["export", folder, "--to", to, "--out", "good"]
    assert refused(polar([*export, "--where", "reward > 1"], here), 1, "no row", "'reward > 1'", "none of 3 traces")
    assert refused(polar([*export, "--where", 'role == "subagent"', "--json"], here), 1, "no row")
    assert {path.name: path.read_text() for path in here.iterdir()} == {"good": "from before"}


# ---- helpers ---------------------------------------------------------------------------------------------


def _terminal(kind: str) -> dict[str, str]:
    return environment(TERM=kind, COLUMNS="80")


def _plain(text: str) -> None:
    """It fits 80 columns and has no control characters but line ends."""
    assert max(map(len, text.splitlines())) <= 80, text
    assert not re.search(r"[^\n -~\u00a0-\uffff]", text), text


def _tokens(folder: Path, session: str) -> int:
    rows = pq.read_table(folder / "traces.parquet").to_pylist()
    return sum(sum(row["loss_mask"]) for row in rows if row["session_id"] == session)
