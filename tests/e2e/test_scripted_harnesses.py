"""pi and mini-swe-agent, unmodified, do whole tasks on a scripted engine; every token is checked against the
engine's own log."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polar.config import parse_task
from polar.contract.result import SessionResult
from polar.gateway.lifecycle import Pools
from polar.gateway.node import Node
from polar.gateway.tasks import make_parts, run_tasks
from polar.results import write_folder
from polar.store import open_store
from tests.cli.making import ScriptedProcess, run, write
from tests.e2e.oracle import Folder, check_against, check_folder, read_folder, read_folder_async
from tests.e2e.scripts import LONG, MAKE, STEPS, link
from tests.support.model import ScriptedModel
from tests.support.script import Script
from tests.support.tokens import ScriptedTokenEngine

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.usefixtures("harnesses")]
HARNESSES = ("pi", "mini_swe_agent")
TURNS = {"make": len(MAKE) + 1, "long": len(LONG) + 1}
TESTS = {
    "make": "grep -qx 'polar bear' animal.txt",
    "long": f"test $(grep -c 'of \"many\", naïve' out.txt) = {len(LONG)}",
}


def a_task(harness: str, name: str, **changes: Any) -> dict[str, Any]:
    evaluator = {"strategy": "test_on_output", "config": {"test_command": TESTS.get(name, "test -s half.txt")}}
    return {
        "task_id": f"{harness}-{name}",
        "instruction": f"Do the work of {link(f'{harness}-{name}', 0)} now.",
        "agent": {"harness": harness},
        "evaluator": evaluator,
        "timeout_seconds": 240,
        **changes,
    }


@dataclass(frozen=True)
class Ran:
    """A run of all tasks: its exit code, its folder, and what the engine generated meanwhile."""

    code: int
    folder: Folder
    generations: list[dict[str, Any]]


@pytest.fixture(scope="module")
def ran(harnesses: None, engine: ScriptedProcess, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Both harnesses with a short task, a long one, and one in which the model kills its harness."""
    here = tmp_path_factory.mktemp("ran")
    tasks = [a_task(harness, name) for harness in HARNESSES for name in ("make", "long", "die")]
    files = [write(here, task, f"{task['task_id']}.yaml") for task in tasks]
    line = [
        "run",
        *files,
        "--out",
        "out",
        "--json",
        "--workers",
        "2",
        "--engine",
        "openai",
        "--engine-url",
        engine.url,
    ]
    before = len(engine.generations())
    done = run(line, here)
    assert done.err == "", done.err
    return Ran(done.code, read_folder(here / "out"), engine.generations()[before:])


def test_the_run_says_that_a_session_failed(ran: Ran):
    assert ran.code == 1
    assert ran.folder.report["sessions"] == {"ended": 6, "unfinished": 0, "COMPLETED": 4, "ERROR": 2}
    check_folder(ran.folder)


@pytest.mark.parametrize("harness", HARNESSES)
@pytest.mark.parametrize("name", ["make", "long"])
def test_the_work_is_done_and_the_main_chain_is_one_trace(ran: Ran, harness: str, name: str):
    result = ran.folder.results[f"{harness}-{name}-0"]
    assert (result.status, result.error) == ("COMPLETED", None)
    check_main_chain(result, TURNS[name])


def check_main_chain(result: SessionResult, turns: int) -> None:
    (trace,) = result.trajectory.traces
    assert (trace.role, trace.reward, len(trace.completion_ids)) == ("main", 1.0, turns)
    assert result.trajectory.metadata["merge_factor"] == turns
    assert result.trajectory.metadata["reconstruction"]["splits"] == []
    assert sum(message.role == "assistant" for message in trace.response_messages) == turns


@pytest.mark.parametrize("harness", HARNESSES)
def test_a_harness_killed_in_the_middle_is_an_error_with_its_traces(ran: Ran, harness: str):
    result = ran.folder.results[f"{harness}-die-0"]
    assert result.status == "ERROR"
    assert result.error is not None
    assert "137" in result.error or "-9" in result.error, result.error
    (trace,) = result.trajectory.traces
    assert (len(trace.completion_ids), trace.reward) == (1, None), "no reward for a run that broke"


def test_every_token_is_the_engine_s_own(ran: Ran):
    check_against(ran.generations, ran.folder.completions, ran.folder.results.values())


async def test_token_ids_in_and_out_keep_pi_s_chain_whole(tiny_model: Path, tmp_path: Path):
    model = ScriptedModel(tiny_model, Script(STEPS))
    node = Node(ScriptedTokenEngine(model), open_store(str(tmp_path / "polar.db")), tmp_path)  # type: ignore[arg-type]
    await node.start()
    try:
        tasks = [parse_task(a_task("pi", name)) for name in ("make", "long")]
        await run_tasks(node, [(task, await make_parts(task)) for task in tasks], pools=Pools())
        await write_folder(node.store, tmp_path)
    finally:
        await node.close()
    folder = await read_folder_async(tmp_path)
    check_folder(folder)
    for name in ("make", "long"):
        check_main_chain(folder.results[f"pi-{name}-0"], TURNS[name])
    check_against([_plain(each) for each in model.log.generations], folder.completions, folder.results.values())


def _plain(generation: Any) -> dict[str, Any]:
    return {name: getattr(generation, name) for name in ("request_id", "context_ids", "sampled_ids", "logprobs")}
