"""Agents and engines that break in the middle: named in the session's error, with what was captured before, and
never with a reward for a run that broke."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.making import ScriptedProcess, agent, run, scripted_process, start, task, write
from tests.e2e.oracle import Folder, check_against, check_folder, read_folder
from tests.support.script import Step

pytestmark = pytest.mark.slow
WORKED = {"strategy": "test_on_output", "config": {"test_command": "test -s received.txt"}}
BAD_CALL = """
import os, urllib.request as r
head = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
r.urlopen(r.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", b"{}", head))
"""
BREAKING = {
    "killed": agent(2, " & pid=$!; while ! test -s received.txt; do sleep 0.01; done; kill -9 $pid; wait $pid"),
    "suicide": agent(1, "; kill -9 $$"),
    "slow": agent(2, "; echo waiting; sleep 1000 & setsid sleep 1000; wait"),
    "pipe": agent(1, "; false | cat"),
    "silent": "echo 'I know it all'",
    "refused": f"python3 -c {shlex.quote(BAD_CALL)}; exit 3",
    "silent-by-leave": "echo 'I know it all'",
    "unknown-program": agent(1, "; no-such-program"),
    "background": f"({agent(1)}; sleep 1000) & while ! test -s received.txt; do sleep 0.01; done",
}


def breaking(name: str) -> dict[str, Any]:
    made: dict[str, Any] = {"harness": "shell", "custom_shell": {"command": BREAKING[name]}}
    if name == "silent-by-leave":
        made["settings"] = {"allow_no_model_call": True}
    limit = {"agent_timeout_seconds": 6.0} if name == "slow" else {}
    return task(name, agent=made, evaluator=WORKED, **limit)


@pytest.fixture(scope="module")
def ran(engine: ScriptedProcess, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Folder]:
    here = tmp_path_factory.mktemp("breaking")
    files = [write(here, breaking(name), f"{name}.yaml") for name in BREAKING]
    line = ["run", *files, "--out", "out", "--json", "--engine", "openai", "--engine-url", engine.url]
    done = run(line, here)
    assert done.err == "", done.err
    return done.code, read_folder(here / "out")


def test_all_of_it_is_accounted_for(ran: tuple[int, Folder], engine: ScriptedProcess):
    code, folder = ran
    assert code == 1
    check_folder(folder)
    known = {completion.completion_id for completion in folder.completions}
    generations = [each for each in engine.generations() if each["request_id"] in known]
    check_against(generations, folder.completions, folder.results.values())


@pytest.mark.parametrize(
    ("name", "status", "words", "calls", "reward"),
    [
        ("killed", "ERROR", "exit code 137", None, None),
        ("suicide", "ERROR", "exit code -9", 1, None),
        ("slow", "TIMEOUT", "stopped after 6 s", 2, 1.0),
        ("pipe", "ERROR", "exit code 1", 1, None),
        ("silent", "ERROR", "no model call", 0, None),
        ("refused", "ERROR", "no model call: its only call was refused: ", 0, None),
        ("silent-by-leave", "COMPLETED", None, 0, 0.0),
        ("unknown-program", "ERROR", "exit code 127", 1, None),
        ("background", "COMPLETED", None, 1, 1.0),
    ],
)
def test_how_it_ended(
    ran: tuple[int, Folder], name: str, status: str, words: str | None, calls: int | None, reward: float | None
):
    _, folder = ran
    result = folder.results[f"{name}-0"]
    assert result.status == status, result.error
    assert (words is None) == (result.error is None)
    assert words is None or words in str(result.error), result.error
    assert "\n" not in str(result.error)
    trained = [name for trace in result.trajectory.traces for name in trace.completion_ids]
    assert calls is None or len(trained) == calls
    assert (result.trajectory.metadata["evaluation"])["outcome_reward"] == reward
    assert {trace.reward for trace in result.trajectory.traces} <= {reward}


def test_what_an_agent_said_is_kept(ran: tuple[int, Folder]):
    _, folder = ran
    logs = folder.path / "sessions"
    assert "I know it all" in (logs / "silent-0/attempt-1/agent.stdout").read_text()
    assert "waiting" in (logs / "slow-0/attempt-1/agent.stdout").read_text()
    assert "no-such-program" in (logs / "unknown-program-0/attempt-1/agent.stderr").read_text()


def test_no_sandbox_is_left_behind(ran: tuple[int, Folder]):
    _, folder = ran
    assert not list(folder.path.rglob(".polar-sandbox"))
    assert not list(Path(folder.path / "sessions").rglob("workspace"))


def test_a_sandbox_that_can_not_be_prepared_is_named(engine: ScriptedProcess, tmp_path: Path):
    write(tmp_path, task(runtime={"prepare": ["true", "echo the disk is missing >&2; exit 5"]}))
    done = run(["run", "task.yaml", "--out", "out", "--engine", "openai", "--engine-url", engine.url], tmp_path)
    assert done.code == 1
    assert done.err == "t-0: ERROR (prepare[1] failed with exit code 5: the disk is missing)\n"
    check_folder(read_folder(tmp_path / "out"))


# ---- engines ---------------------------------------------------------------------------------------------


def test_an_engine_without_token_ids_or_logprobs_is_named_at_the_first_call(engine: ScriptedProcess, tmp_path: Path):
    tasks = [
        task(name.replace(" ", "-"), instruction=f"say [{name}]") for name in ("no ids", "no logprob", "refused")
    ]
    files = [write(tmp_path, body, f"{body['task_id']}.yaml") for body in tasks]
    line = ["run", *files, "--out", "out", "--json", "--engine", "openai", "--engine-url", engine.url]
    assert run(line, tmp_path).code == 1
    folder = read_folder(tmp_path / "out")
    check_folder(folder)
    results = {name: folder.results[f"{name}-0"] for name in ("no-ids", "no-logprob", "refused")}
    fates = {name: list(each.trajectory.metadata["reconstruction"]["completions"]) for name, each in results.items()}
    assert fates == {"no-ids": ["no_token_ids"], "no-logprob": ["logprob_missing"], "refused": ["engine_error"]}
    assert not any(each.trajectory.traces for each in results.values())
    assert results["no-ids"].status == "ERROR"
    assert "token_ids" in str(results["no-ids"].error)
    assert f"{engine.url}/v1/chat/completions" in str(results["no-ids"].error)
    assert results["refused"].status == "ERROR"
    (refused,) = folder.of("refused-0", 1)
    assert "the engine does not like it" in str(refused.detail)


def test_missing_token_ids_can_be_allowed(engine: ScriptedProcess, tmp_path: Path):
    file = write(tmp_path, task("no-ids", instruction="say [no ids]"), "no-ids.yaml")
    line = ["run", file, "--out", "out", "--json", "--engine", "openai", "--engine-url", engine.url]
    assert run([*line, "--allow-missing-token-ids"], tmp_path).code == 0
    (result,) = read_folder(tmp_path / "out").results.values()
    assert result.status == "COMPLETED"
    assert list(result.trajectory.metadata["reconstruction"]["completions"]) == ["no_token_ids"]


def test_an_engine_that_dies_in_the_middle_ends_the_sessions_and_not_the_run(tiny_model: Path, tmp_path: Path):
    slow = [Step(text="one"), Step(text="two is long enough to be cut off", token_delay=0.3)]
    with scripted_process(tiny_model, slow, tmp_path / "engine") as dying:
        shell = {"harness": "shell", "custom_shell": {"command": agent(2)}}
        write(tmp_path, task(agent=shell, num_samples=2))
        line = ["run", "task.yaml", "--out", "out", "--json", "--engine", "openai", "--engine-url", dying.url]
        with start(line, tmp_path) as process:
            while len(dying.generations()) < 4:
                assert process.poll() is None, process.communicate()
            dying.kill()
            out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    report = json.loads(out)
    assert report["sessions"] == {"ended": 2, "unfinished": 0, "ERROR": 2}
    assert report["completions"] == {"trained": 2, "engine_error": 2}
    check_folder(read_folder(tmp_path / "out"))
