"""An engine that returns no token ids, where none are required: there is nothing to train on, and the text of the
conversations comes out all the same."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.making import Forked, agent, refused, scripted_process, task, write
from tests.support.script import Step
from tests.support.tinymodel import make_tiny_model

TURNS = 3
SHELL = {"harness": "shell", "custom_shell": {"command": agent(TURNS)}}


def test_sft_has_the_conversations_of_calls_without_ids(polar: Forked, here: Path, tmp_path: Path) -> None:
    steps = [Step(text=f"reply {turn}", omit_token_ids=True, logprobs="omit") for turn in range(TURNS)]
    with scripted_process(make_tiny_model(tmp_path / "model"), steps, tmp_path / "engine") as engine:
        line = ["--engine", "openai", "--engine-url", engine.url, "--allow-missing-token-ids", "--json"]
        done = polar(["run", write(here, task(agent=SHELL, num_samples=2)), "--out", "out", *line], here)
    assert done.code == 0, done.err
    assert done.json["completions"] == {"no_token_ids": 2 * TURNS}
    assert done.json["traces"] == 0
    assert (
        "\nreward: 1\nevaluation: session_completed, reward 1, exit code 0\n"
        in polar(["show", "out", "t-0"], here).out
    )
    done = polar(["export", "out", "--to", "sft", "--where", "reward >= 1", "--out", "sft.jsonl", "--json"], here)
    assert (done.code, done.json) == (0, {"path": "sft.jsonl", "rows": 2})
    for row in map(json.loads, (here / "sft.jsonl").read_text().splitlines()):
        assert row["text_only"] is True
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert said == [f"reply {turn}" for turn in range(TURNS)]
    assert refused(polar(["export", "out", "--to", "parquet"], here), 1, "there is no trace")
