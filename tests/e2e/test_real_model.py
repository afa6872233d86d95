"""Both harnesses, unmodified, on the embedded engine with a real model: everything is captured, everything adds
up, and the logprobs are the model's own. What it is worth, a model this small decides by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from datasets import load_dataset

from polar.engines import DEFAULT_MODEL
from polar.engines.local import LocalEngine
from tests.cli.making import agent, run, task, write
from tests.e2e.oracle import Folder, check_folder, read_folder

pytestmark = [pytest.mark.real, pytest.mark.slow]
TEMPERATURE, TURNS = 0.7, 3
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello > greeting.txt"}}\n</tool_call>'


def a_task(task_id: str, made_by: dict[str, Any], samples: int, words: str) -> dict[str, Any]:
    return task(
        task_id,
        agent=made_by,
        instruction=words,
        num_samples=samples,
        agent_timeout_seconds=240,
        sampling={"temperature": TEMPERATURE, "max_tokens": 48},
        evaluator={"strategy": "test_on_output", "config": {"test_command": "grep -qx hello greeting.txt"}},
    )


@pytest.fixture(scope="module")
def ran(harnesses: None, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    here = tmp_path_factory.mktemp("real")
    words = f"Call the bash tool now. Answer with exactly this and nothing else:\n{CALL}"
    shell = {"harness": "shell", "custom_shell": {"command": agent(TURNS)}}
    tasks = [
        a_task("pi", {"harness": "pi"}, 2, words),
        a_task("mini", {"harness": "mini_swe_agent"}, 1, words),
        a_task("talk", shell, 1, "Tell me a story about a polar bear."),
    ]
    files = [write(here, body, f"{body['task_id']}.yaml") for body in tasks]
    done = run(["run", *files, "--out", "out", "--json"], here, timeout=500)
    assert done.code == 0, done
    return read_folder(here / "out")


def test_everything_is_there_and_adds_up(ran: Folder):
    check_folder(ran)
    assert ran.report["sessions"] == {"ended": 4, "unfinished": 0, "COMPLETED": 4}
    assert all(reward in (0.0, 1.0) for task in ran.report["tasks"].values() for reward in task["rewards"])
    for result in ran.results.values():
        assert result.trajectory.traces
        provenance = result.trajectory.metadata["provenance"]
        assert (provenance["engine"], provenance["model"]) == ("local", DEFAULT_MODEL)
    assert {each.outcome for each in ran.completions} == {"ok"}
    assert all(0 < len(each.response_ids) <= 48 for each in ran.completions)


def test_the_dataset_is_read_by_a_trainer_s_library(ran: Folder):
    rows = load_dataset("parquet", data_files=str(ran.path / "traces.parquet"), split="train")
    assert len(rows) == ran.report["traces"]
    for row in rows:
        lengths = {len(row[name]) for name in ("response_ids", "loss_mask", "response_logprobs", "weight_versions")}
        assert lengths == {len(row["response_ids"])}
        assert set(row["loss_mask"]) <= {0, 1}
    assert {row["harness"] for row in rows} == {"pi", "mini_swe_agent", "shell"}


def test_a_conversation_is_one_trace(ran: Folder):
    (trace,) = ran.results["talk-0"].trajectory.traces
    assert len(trace.completion_ids) == TURNS


async def test_logprobs_are_the_model_s_own(ran: Folder):
    engine = LocalEngine(DEFAULT_MODEL)
    await engine.start()
    try:
        worst = 0.0
        for result in ran.results.values():
            for trace in result.trajectory.traces:
                ids = np.concatenate([trace.prompt_ids, trace.response_ids])
                scores = (await engine.score(ids, TEMPERATURE))[len(trace.prompt_ids) :]
                trained = trace.loss_mask == 1
                worst = max(worst, float(np.abs(scores - trace.response_logprobs)[trained].max()))
        print(f"\nlargest difference of a logprob: {worst:.2e}")
        assert worst < 1e-3
    finally:
        await engine.close()
