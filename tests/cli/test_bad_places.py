"""Engines that are not there and folders that can't be used: one line, nothing lost, nothing left running."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.making import Done, Forked, ScriptedProcess, refused, start, task, write
from tests.support.ports import free_port


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_no_engine_is_running_there(polar: Forked, here: Path):
    write(here, task())
    url = f"http://127.0.0.1:{free_port()}"
    line = ["run", "task.yaml", "--engine", "openai", "--engine-url", url]
    assert refused(polar(line, here), 2, url, "no engine answers", "--engine-url")


def test_what_runs_there_is_no_engine(polar: Forked, here: Path, engine: ScriptedProcess):
    write(here, task())
    line = ["run", "task.yaml", "--engine", "openai", "--engine-url", f"{engine.url}/scripted/log"]
    assert refused(polar(line, here), 2, "--engine-url", "/v1/models")


def test_the_engine_does_not_serve_the_model(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task())
    assert refused(
        polar(["run", "task.yaml", "--model", "gpt-9", *to_engine], here), 2, "gpt-9", "scripted", "--model"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--engine", "nonsense"], ["nonsense", "local", "openai"]),
        (["--engine", "openai"], ["--engine-url"]),
        (["--engine", "vllm", "--engine-url", "127.0.0.1:8000"], ["127.0.0.1:8000", "http"]),
        (["--engine-url", "http://127.0.0.1:1"], ["--engine-url", "embedded", "vllm, sglang or openai"]),
        (["--engine", "openai", "--engine-url", "http://127.0.0.1:1", "--mode", "nonsense"], ["nonsense", "chat"]),
        (["--mode", "chat"], ["--mode chat"]),
        (["--model", "no/such/model"], ["no/such/model", "SmolLM2"]),
        (["--samples", "0"], ["--samples"]),
        (["--workers", "0"], ["--workers"]),
        (["--builder", "lego"], ["lego"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_options_that_make_no_sense_are_named(polar: Forked, here: Path, line: list[str], words: list[str]):
    write(here, task())
    assert refused(polar(["run", "task.yaml", "--out", "out", *line], here), 2, *words)
    assert files(here) == {"task.yaml"}, "a run that could not begin leaves no folder"


def test_no_command_and_an_unknown_one(polar: Forked, here: Path):
    assert refused(polar(["dance"], here), 2, "dance")
    assert refused(polar(["run"], here), 2, "TASK.yaml")
    assert refused(polar(["show"], here), 2, "SESSION")
    assert refused(polar(["capture"], here), 2, "CMD")


# ---- results folders -------------------------------------------------------------------------------------


def test_out_is_a_file_or_under_one(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task())
    (here / "file").write_text("mine")
    for out in ("file", "file/below"):
        assert refused(polar(["run", "task.yaml", "--out", out, *to_engine], here), 2, out, "--out")
    assert (here / "file").read_text() == "mine"


def test_another_task_of_that_id_was_run_there(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task())
    run = ["run", "task.yaml", "--out", "out", *to_engine]
    assert polar(run, here).code == 0
    before = (here / "out" / "results.jsonl").read_bytes()
    write(here, task(instruction="say something else"))
    assert refused(polar(run, here), 2, "'t'", "--out", "task_id")
    assert (here / "out" / "results.jsonl").read_bytes() == before


def test_a_folder_with_a_database_of_somebody_else(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task())
    (here / "out").mkdir()
    (here / "out" / "polar.db").write_text("this is no database, and it is mine")
    assert refused(polar(["run", "task.yaml", "--out", "out", *to_engine], here), 2, "polar.db", "not a database")
    assert (here / "out" / "polar.db").read_text() == "this is no database, and it is mine"


def test_two_runs_in_one_folder_at_once(polar: Forked, here: Path, to_engine: list[str]):
    command = "echo started; touch started; until test -e go; do sleep 0.05; done"
    write(here, task(agent={"harness": "shell", "custom_shell": {"command": command}}))
    run = ["run", "task.yaml", "--out", "out", "--no-sandbox", *to_engine]
    with start(run, here) as first:
        began = here / "out/sessions/t-0/attempt-1/runtime/workspace/started"
        while not began.exists():
            assert first.poll() is None, first.communicate()
        assert refused(polar(run, here), 2, "polar.db", "is being written by process", "--store")
        began.with_name("go").touch()
        out, err = first.communicate(timeout=60)
    assert (first.returncode, "no model call" in out) == (1, True), err


@contextmanager
def mounted(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A small file system of its own at ``folder``; skips the test where none can be mounted."""
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(line, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system can't be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_disk(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task())
    with mounted(here / "disk", "1m", "ro"):
        assert refused(polar(["run", "task.yaml", "--out", "disk/out", *to_engine], here), 2, "disk/out", "--out")


def test_a_full_disk(polar: Forked, here: Path, to_engine: list[str]):
    write(here, task(num_samples=12))
    with mounted(here / "disk", "512k") as disk:
        done = polar(["run", "task.yaml", "--out", "disk/out", *to_engine], here)
        refused_on_a_full_disk(done)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = polar(["run", "task.yaml", "--out", "disk/out", "--json", *to_engine], here)
        assert (again.code, again.json["sessions"]["COMPLETED"]) == (0, 12), again


def refused_on_a_full_disk(done: Done) -> None:
    """Sessions may have ended before the disk was full; the last line says what the matter is."""
    assert done.code in (1, 2), done
    assert "Traceback" not in done.err, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("polar: "), done.err
    assert "full" in last or "space" in last, done.err
