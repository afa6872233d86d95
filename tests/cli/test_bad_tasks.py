"""A task file with a mistake in it: one line that names the file and the mistake, exit code 2, and nothing is
made, neither a results folder nor a call to the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.making import Forked, refused, task, write

SHELL = task()["agent"]


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in task().items() if key != name}


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "unknown field": (task(num_sample=3), ["task.yaml: ", "num_sample", "did you mean num_samples?"]),
    "unknown field below": (task(agent={**SHELL, "modle": "m"}), ["modle", "agent", "model_name"]),
    "unknown sampling field": (task(sampling={"temprature": 1}), ["temprature", "did you mean temperature?"]),
    "missing task_id": (without("task_id"), ["task_id"]),
    "missing instruction": (without("instruction"), ["instruction"]),
    "missing agent": (without("agent"), ["agent"]),
    "not YAML": ("task_id: [t\ninstruction: x", ["YAML"]),
    "empty": ("", ["mapping"]),
    "a list": ("- 1\n- 2\n", ["mapping"]),
    "a control character": ("task_id: t\x00", ["YAML"]),
    "not UTF-8": (b"task_id: \xff\xfe", ["read"]),
    "empty instruction": (task(instruction="  \n "), ["instruction"]),
    "instruction of another type": (task(instruction=7), ["instruction"]),
    "two harnesses": (task(agent={**SHELL, "import_path": "a:B"}), ["harness", "import_path"]),
    "no harness": (task(agent={}), ["harness"]),
    "task_id with a slash": (task("../t"), ["task_id"]),
    "task_id empty": (task(""), ["task_id"]),
    "task_id too long": (task("t" * 121), ["task_id", "120"]),
    "no samples": (task(num_samples=0), ["num_samples"]),
    "samples of another type": (task(num_samples="two"), ["num_samples"]),
    "negative time limit": (task(timeout_seconds=-5), ["timeout_seconds"]),
    "time limit without end": (task(agent_timeout_seconds=float("inf")), ["agent_timeout_seconds"]),
    "unknown harness": (task(agent={"harness": "codecks"}), ["codecks", "pi"]),
    "unknown evaluator": (task(evaluator={"strategy": "vibes"}), ["vibes", "test_on_output"]),
    "unknown builder": (task(builder={"strategy": "lego"}), ["lego", "prefix_merging"]),
    "unknown builder config": (task(builder={"config": {"drft": "split"}}), ["drft"]),
    "unknown runtime": (task(runtime={"backend": "podman"}), ["podman"]),
    "runtime of another version": (task(runtime={"backend": "docker"}), ["docker", "local"]),
    "workspace that is nowhere": (task(runtime={"workdir": "relative"}), ["task.yaml: ", "workdir", "absolute"]),
    "workspace in the system": (task(runtime={"workdir": "/etc"}), ["workdir", "/etc", "read-only"]),
    "an evaluator's name alone": (
        task(evaluator="test_on_output"), ["task.yaml: evaluator", "{strategy: test_on_output, config: {...}}"]),
    "a builder's name alone": (task(builder="per_request"), ["builder", "{strategy: per_request, config: {...}}"]),
    "an agent's name alone": (task(agent="pi"), ["agent", "write {harness: pi}"]),
    "a runtime's name alone": (task(runtime="local"), ["runtime", "write {backend: local}"]),
    "a class alone": (task(evaluator="my.module:Class"), ["evaluator", "{strategy: NAME, config: {...}}"]),
    "no processor": (task(runtime={"cpus": 0}), ["cpus"]),
    "no memory": (task(runtime={"memory_mb": 0}), ["memory_mb"]),
    "network against itself": (task(runtime={"network": "host"}), ["network", "allow_internet"]),
    "evaluator without its command": (
        task(evaluator={"strategy": "test_on_output"}), ["task.yaml: ", "test_command"]),
    "unknown evaluator config": (
        task(evaluator={"strategy": "test_on_output", "config": {"test_command": "true", "timeout": 1}}),
        ["timeout", "did you mean timeout_seconds?"],
    ),
    "unknown status of a test": (
        task(evaluator={"strategy": "test_on_output", "config": {
            "test_command": "true", "expected_output_json": {"test_a": "GREEN"}}}),
        ["test_a", "GREEN", "PASSED"],
    ),
    "unknown harness setting": (task(agent={"harness": "pi", "settings": {"apy": 1}}), ["apy"]),
    "empty command": (task(agent={"harness": "shell", "custom_shell": {"command": " "}}), ["custom_shell"]),
    "classes without leave": (task(agent={"import_path": "a:B"}), ["import"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_in_one_line(polar: Forked, here: Path, installed_pi: dict[str, str], mistake: str):
    body, words = MISTAKES[mistake]
    path = here / "task.yaml"
    path.write_bytes(body) if isinstance(body, bytes) else write(here, body)
    done = polar(
        ["run", "task.yaml", "--out", "out", "--engine", "openai", "--engine-url", "http://127.0.0.1:1"],
        here,
        **installed_pi,
    )
    assert refused(done, 2, *words)
    assert [path.name for path in here.iterdir()] == ["task.yaml"]


def test_a_workspace_of_its_own_needs_a_sandbox(polar: Forked, here: Path):
    write(here, task(runtime={"workdir": "/data"}))
    line = ["run", "task.yaml", "--no-sandbox", "--engine", "openai", "--engine-url", "http://127.0.0.1:1"]
    assert refused(polar(line, here), 2, "task.yaml: ", "workdir", "sandbox")


def test_a_missing_file_and_a_folder_are_named(polar: Forked, here: Path):
    assert refused(polar(["run", "nothing.yaml"], here), 2, "nothing.yaml", "no such task file")
    (here / "tasks").mkdir()
    assert refused(polar(["run", "tasks"], here), 2, "tasks", "folder")
    assert [path.name for path in here.iterdir()] == ["tasks"]


def test_the_second_of_two_files_is_named_when_it_is_wrong(polar: Forked, here: Path):
    write(here, task("a"), "a.yaml")
    write(here, task("b", oops=1), "b.yaml")
    assert refused(polar(["run", "a.yaml", "b.yaml"], here), 2, "b.yaml", "oops")
    write(here, task("a"), "b.yaml")
    assert refused(polar(["run", "a.yaml", "b.yaml"], here), 2, "same task_id")


def test_a_harness_that_is_not_installed_says_how_to_install_it(polar: Forked, here: Path, tmp_path: Path):
    empty = {"POLAR_HOME": str(tmp_path / "nothing"), "PATH": "/usr/bin:/bin"}
    for name in ("pi", "mini_swe_agent"):
        write(here, task(agent={"harness": name}))
        assert refused(
            polar(["run", "task.yaml"], here, **empty), 2, name, "not installed", f"polar doctor --fix {name}"
        )
    assert [path.name for path in here.iterdir()] == ["task.yaml"]


def test_a_task_may_be_json_and_its_words_any_script(polar: Forked, here: Path, to_engine: list[str]):
    odd = task(
        "j", instruction="naïve 東京 $(id) '\"", agent={"harness": "shell", "custom_shell": {"command": "true"}}
    )
    write(here, json.dumps(odd, ensure_ascii=False), "t.json")
    done = polar(["run", "t.json", "--out", "out", *to_engine], here)
    assert (done.code, "no model call" in done.out) == (1, True)
