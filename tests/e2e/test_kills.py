"""The whole of ``polar run`` is killed in the middle, at a random place, and run again: nothing that an agent was
told is lost, nothing of the old run is alive, and every session ends."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.making import ScriptedProcess, agent, environment, run, scripted_process, start, task, write
from tests.e2e.oracle import Folder, check_against, check_folder, read_folder
from tests.support.script import Step

pytestmark = pytest.mark.slow
TURNS, SAMPLES = 8, 2


@pytest.fixture(scope="module")
def slow_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProcess]:
    """One that takes some time for each token, so that a kill finds calls in flight."""
    steps = [Step(text=f"reply number {turn} is a few tokens long", token_delay=0.005) for turn in range(TURNS)]
    with scripted_process(tiny_model, steps, tmp_path_factory.mktemp("slow-engine")) as running:
        yield running


def a_run(here: Path, engine: ScriptedProcess, *, sandbox: bool) -> list[str | Path]:
    env = {} if sandbox else {"RECEIVED": str(here / "received.txt")}
    shell = {"harness": "shell", "env": env, "custom_shell": {"command": agent(TURNS)}}
    write(here, task(agent=shell, num_samples=SAMPLES))
    line = ["run", "task.yaml", "--out", "out", "--engine", "openai", "--engine-url", engine.url]
    return line if sandbox else [*line, "--no-sandbox"]


def received(here: Path, *, sandbox: bool) -> list[tuple[str, str]]:
    """``(completion id, text)`` of every reply that an agent of the first attempts has got, by its own record."""
    if sandbox:
        files = here.glob("out/sessions/*/attempt-1/agent.stdout")
        lines = [json.loads(line) for file in files for line in whole_lines(file)]
    else:
        lines = [json.loads(line)[1:] for line in whole_lines(here / "received.txt")]
    return [(name.removeprefix("chatcmpl-"), text) for name, text in lines]


def whole_lines(file: Path) -> list[str]:
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def wait_for_replies(process: subprocess.Popen[str], here: Path, count: int, *, sandbox: bool) -> None:
    deadline = time.monotonic() + 120
    while len(received(here, sandbox=sandbox)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [each.cmdline() for each in alive if each.is_running()]


@pytest.mark.parametrize("seed", range(4))
def test_killed_and_run_again(slow_engine: ScriptedProcess, tmp_path: Path, seed: int):
    chance, sandbox = random.Random(seed), seed % 2 == 0
    line = a_run(tmp_path, slow_engine, sandbox=sandbox)
    with start(line, tmp_path) as process:
        wait_for_replies(process, tmp_path, chance.randrange(1, TURNS * SAMPLES - 3), sandbox=sandbox)
        time.sleep(chance.uniform(0, 0.15))
        children = below(process)
        assert children, "there is a sandbox to look for"
        process.kill()
        process.communicate()
    all_gone(children)
    told = received(tmp_path, sandbox=sandbox)

    done = run([*line, "--json"], tmp_path)
    assert done.code == 0, done.err
    folder = read_folder(tmp_path / "out")
    check_folder(folder)
    kept = {each.completion_id: each.reply.content for each in folder.completions if each.attempt == 1}
    assert {name: kept.get(name) for name, _ in told} == dict(told), "a reply was told and is not in the store"
    attempts = {name: record.attempt for name, record in folder.sessions.items()}
    assert max(attempts.values()) == 2, "a session was cut off"
    assert [record.state for record in folder.sessions.values()] == ["COMPLETED"] * SAMPLES
    assert folder.report["completions"]["trained"] == TURNS * SAMPLES
    check_new_attempts(slow_engine, folder)
    assert not list((tmp_path / "out").rglob(".polar-sandbox"))


def check_new_attempts(engine: ScriptedProcess, folder: Folder) -> None:
    """The attempts that ended, token by token; of those before, the engine knows every call, too."""
    generations: dict[str, dict[str, Any]] = {each["request_id"]: each for each in engine.generations()}
    ended = [each for each in folder.completions if each.attempt == folder.sessions[each.session_id].attempt]
    check_against([generations[each.completion_id] for each in ended], ended, folder.results.values())
    for completion in folder.completions:
        assert completion.response_ids.tolist() == generations[completion.completion_id]["sampled_ids"]


def test_killed_while_the_evaluations_sandbox_is_made(slow_engine: ScriptedProcess, tmp_path: Path):
    shell = {"harness": "shell", "custom_shell": {"command": f"{agent(1)}; sleep 5"}}
    # The evaluation's sandbox has no way to the model: there it takes long.
    prepare = "touch ~/tool; (: > /dev/tcp/127.0.0.1/8080) 2> /dev/null || { echo long; sleep 3; }"
    tested = {"strategy": "test_on_output", "config": {"test_command": "test -e ~/tool"}, "refresh_runtime": True}
    write(tmp_path, task(agent=shell, runtime={"prepare": [prepare]}, evaluator=tested))
    line = ["run", "task.yaml", "--out", "out", "--engine", "openai", "--engine-url", slow_engine.url]
    said = tmp_path / "out" / "sessions" / "t-0" / "attempt-1" / "eval-runtime-prepare-0.stdout"
    with start(line, tmp_path) as process:
        deadline = time.monotonic() + 120
        while not (said.exists() and said.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        children = below(process)
        process.kill()
        process.communicate()
    all_gone(children)
    assert len(list((tmp_path / "out").rglob(".polar-sandbox"))) == 2, "the agent's and the evaluation's"

    done = run([*line, "--json"], tmp_path)
    assert done.code == 0, done.err
    (result,) = read_folder(tmp_path / "out").results.values()
    assert (result.attempt, result.trajectory.metadata["evaluation"]["outcome_reward"]) == (2, 1.0)
    assert "warm" in result.timing
    assert not list((tmp_path / "out").rglob(".polar-sandbox"))
    assert not list((tmp_path / "out" / "sessions").rglob("runtime"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_stopped_and_gone_on_with(slow_engine: ScriptedProcess, tmp_path: Path, how: signal.Signals):
    line = a_run(tmp_path, slow_engine, sandbox=True)
    with start(line, tmp_path, env=environment(COLUMNS="80")) as process:
        wait_for_replies(process, tmp_path, 3, sandbox=True)
        children = below(process)
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
    all_gone(children)
    assert (process.returncode, out) == (128 + how, "")
    assert err == "polar: interrupted: run it again with --out out to go on\n"
    assert not list((tmp_path / "out").rglob(".polar-sandbox"))
    told = received(tmp_path, sandbox=True)

    assert run(line, tmp_path).code == 0
    folder = read_folder(tmp_path / "out")
    check_folder(folder)
    assert {record.attempt for record in folder.sessions.values()} == {2}
    assert {name for name, _ in told} <= {each.completion_id for each in folder.completions if each.attempt == 1}


def test_a_session_that_is_cut_off_each_time_ends_as_an_error(slow_engine: ScriptedProcess, tmp_path: Path):
    line = a_run(tmp_path, slow_engine, sandbox=False)
    for _ in range(3):
        with start([*line, "--samples", "1"], tmp_path) as process:
            wait_for_replies(process, tmp_path, 1, sandbox=False)
            children = below(process)
            process.kill()
            process.communicate()
        all_gone(children)
        (tmp_path / "received.txt").unlink()
    done = run([*line, "--samples", "1"], tmp_path)
    assert done.code == 1
    folder = read_folder(tmp_path / "out")
    (result,) = folder.results.values()
    assert (result.status, result.error) == ("ERROR", "attempts exhausted: cut off 3 times")
    check_folder(folder)
