"""A builder and an evaluator of one's own, from the folder that polar is run in to the results."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from tests.cli.conftest import Forked, ScriptedProcess
from tests.cli.making import agent, task, write

MINE = '''
from polar.contract.task import BuilderSpec
from polar.evaluators.base import Evaluation
from polar.trajectories import make_builder

class Each:
    """Every call on its own."""
    name = "each"
    def build(self, completions):
        return make_builder(BuilderSpec(strategy="per_request")).build(completions)

class Half:
    name = "half"
    def __init__(self, spec): self.reward = spec.config["reward"]
    async def evaluate(self, session): return Evaluation(outcome_reward=self.reward)

class Bad(Half):
    async def evaluate(self, session): return 1.0
'''


def test_own_classes_reach_the_results_and_a_bad_one_is_its_session_s_error(
    polar: Forked, engine: ScriptedProcess, tmp_path: Path
):
    (tmp_path / "mine_for_polar.py").write_text(MINE)
    shell = {"harness": "shell", "custom_shell": {"command": agent(2)}}
    own = {"builder": {"strategy": "mine_for_polar:Each"}, "agent": shell}
    half = {"strategy": "mine_for_polar:Half", "config": {"reward": 0.5}}
    files = [
        write(tmp_path, task("good", evaluator=half, **own), "good.yaml"),
        write(tmp_path, task("bad", evaluator={**half, "strategy": "mine_for_polar:Bad"}, **own), "bad.yaml"),
    ]
    line = ["run", *files, "--out", "out", "--json", "--engine", "openai", "--engine-url", engine.url]
    refused = polar(line, tmp_path)
    assert refused.code == 2
    assert "--allow-import" in refused.err
    done = polar([*line, "--allow-import"], tmp_path)
    assert done.code == 1, done.err
    rows = pq.read_table(tmp_path / "out" / "traces.parquet").to_pylist()
    assert [(row["task_id"], row["reward"]) for row in rows] == [("good", 0.5)] * 2 + [("bad", None)] * 2
    assert "returned float" in next(iter(done.json["errors"]))
    assert polar(["show", "out", "good-0", "--allow-import"], tmp_path).code == 0
