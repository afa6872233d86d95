"""The contract of NVIDIA's public clients, field by field: the tasks that they write out whole are taken, what they
ask for is done or refused by name, and what they read parses under their own rules.

The shapes are restated here from what is published, with what they refuse refused here, too.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest

from polar.config import load_task, parse_task
from polar.contract.errors import UsageError
from polar.contract.rollout import Delivery
from polar.evaluators import make_evaluator
from polar.harnesses import Endpoint, Installed, make_harness
from polar.rollout.callbacks import CallbackConfig
from tests.rollout import making
from tests.rollout.conftest import MakeWorld, World
from tests.rollout.making import TOKENS
from tests.rollout.receiver import Receiver

State = Literal[
    "REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING", "COMPLETED", "ERROR",
    "TIMEOUT",
]  # fmt: skip
MILLISECONDS = [
    "register_to_init_queue", "rollout_dispatch", "rollout_result_wait", "rollout_pipeline_e2e", "init", "run",
    "ready_queue", "postrun_queue", "postrun", "container_start", "eval_container_start", "runtime_validation",
    "prepare", "eval_runtime_validation", "eval_prepare", "agent_setup", "agent_exec", "agent_postprocess", "build",
    "eval", "postrun_exec", "runtime_stop", "e2e", "runtime_exec", "mini_swe_command",
]  # fmt: skip
Timing = msgspec.defstruct(
    "Timing", [(f"{name}_ms", float, 0.0) for name in MILLISECONDS], forbid_unknown_fields=True, kw_only=True
)
"""The one model of theirs that refuses names it does not know."""


class Trace(msgspec.Struct, kw_only=True):
    prompt_ids: list[int] = []
    response_ids: list[int] = []
    loss_mask: list[Annotated[int, msgspec.Meta(ge=0, le=1)]] = []
    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    response_logprobs: list[float] | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.loss_mask and len(self.loss_mask) != len(self.response_ids):
            raise ValueError("loss_mask")
        if self.response_logprobs is not None and len(self.response_logprobs) != len(self.response_ids):
            raise ValueError("response_logprobs")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError("reward")


class Trajectory(msgspec.Struct, kw_only=True):
    status: Literal["COMPLETED", "TIMEOUT", "ERROR"]
    metadata: dict[str, Any] = {}
    traces: list[Trace] = []
    error: str | None = None


class Result(msgspec.Struct, kw_only=True):
    session_id: str
    task_id: str
    status: State
    trajectory: Trajectory
    timing: Timing  # type: ignore[valid-type]
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}


class Status(msgspec.Struct, kw_only=True):
    task_id: str
    status: str
    total_sessions: int
    completed_sessions: int
    results: list[Result] = []
    result_paths: list[str] = []


class Called(msgspec.Struct, kw_only=True):
    """The body of a callback."""

    task_id: str
    status: str
    results: list[Result]
    result_paths: list[str] = []


def runtime(**fields: Any) -> dict[str, Any]:
    """A runtime of theirs, dumped: every field."""
    return {
        "backend": "docker",
        "image": "python:3.12",
        "prepare": [],
        "eval_prepare": None,
        "env": {},
        "network": "host",
        "workdir": None,
        "direct_exec_init_command": None,
        "cpus": None,
        "memory_mb": None,
        "storage_mb": None,
        "gpus": 0,
        "allow_internet": True,
        "internet_volumes": [],
        "import_path": None,
        "kwargs": {},
        **fields,
    }


def action(command: str | None = None, **fields: Any) -> dict[str, Any]:
    """A step of ``prepare``, dumped."""
    return {
        "type": "exec",
        "source": None,
        "target": None,
        "command": command,
        "cwd": None,
        "env": None,
        "max_attempts": 1,
        "retry_backoff_seconds": 0.0,
        **fields,
    }


def agent(**fields: Any) -> dict[str, Any]:
    """An agent, dumped."""
    return {
        "harness": "codex",
        "import_path": None,
        "model_name": "m",
        "settings": {},
        "env": {},
        "mcp_servers": [],
        "skills_path": None,
        "custom_shell": None,
        **fields,
    }


def dumped(task_id: str = "p-1", **fields: Any) -> dict[str, Any]:
    """A task, dumped."""
    return {
        "task_id": task_id,
        "instruction": "do it",
        "num_samples": 1,
        "dispatch_priority": 0,
        "early_stop_min_usable_sessions": None,
        "timeout_seconds": 600.0,
        "runtime": None,
        "agent": agent(),
        "builder": {"strategy": "per_request", "config": {}},
        "evaluator": None,
        "callback_url": None,
        "metadata": {"group_id": 3, "policy_version": 7, "rollout_step": 9, "agent_timeout": 300},
        **fields,
    }


WORKSPACE = "/polar/session/workspace"
TEST_LINE = f"cd {WORKSPACE} && python3 test_calculator.py && echo 'PASSED test_calculator'"


def calculator(**config: Any) -> dict[str, Any]:
    """The task of their first example, as it writes it: it names what it wants, and no more."""
    files = [
        {"type": "upload_file", "source": f"/home/u/assets/{name}.py", "target": f"{WORKSPACE}/{name}.py"}
        for name in ("test_calculator", "calculator")
    ]
    return {
        "task_id": "calculator-codex-20260101T000000Z",
        "instruction": "Write the parser.",
        "num_samples": 4,
        "timeout_seconds": 1200.0,
        "runtime": {
            "backend": "docker",
            "image": "polar-localhost-calculator:latest",
            "prepare": [
                {"type": "exec", "command": f"npm install -g @openai/codex && mkdir -p {WORKSPACE} && git init -q"},
                *files,
                {"type": "exec", "command": f"cd {WORKSPACE} && git add -A && git commit -qm initial"},
            ],
            "network": "host",
            "workdir": WORKSPACE,
        },
        "agent": {
            "harness": "codex",
            "model_name": "openai/gpt-5.5",
            "settings": {"version": "0.125.0", "reasoning_effort": "xhigh"},
        },
        "builder": {"strategy": "prefix_merging"},
        "evaluator": {
            "strategy": "test_on_output",
            "config": {
                "repo_dir": WORKSPACE,
                "patch_command": f"cd {WORKSPACE} && git add -A && git diff --cached --binary",
                "test_command": TEST_LINE,
                "test_timeout": 60.0,
                "expected_output_json": {"test_calculator": "PASSED"},
                "exclude_patterns": ["node_modules/**", "**/node_modules/**", "**/.venv/**", ".codex/**"],
                **config,
            },
            "refresh_runtime": True,
        },
    }


def possible(**config: Any) -> dict[str, Any]:
    """That task with its files written by steps, and without a version of the harness."""
    task = calculator(**config)
    steps = task["runtime"]["prepare"]
    for step in steps[1:3]:
        step.update(type="exec", command=f"cat > {step['target']} <<'X'\nprint()\nX", source=None, target=None)
    del task["agent"]["settings"]["version"]
    return task


# ---- what they write -------------------------------------------------------------------------------------


def test_every_field_that_asks_for_nothing_is_taken() -> None:
    task = parse_task(dumped(runtime=runtime()))
    assert (task.runtime.backend, task.runtime.image, task.runtime.network) == ("docker", "python:3.12", "host")
    assert task.runtime.allow_internet
    assert task.builder.strategy == "per_request"
    assert task.metadata["agent_timeout"] == 300
    assert parse_task(dumped(runtime=None)).runtime.backend == "local"


def test_a_task_file_of_theirs_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(
        "task_id: swe-1\ninstruction: fix it\nruntime:\n  backend: apptainer\n  image: x.sif\n  network: host\n"
        "  prepare:\n    - {type: exec, command: git init -q}\nagent: {harness: codex, model_name: m}\n"
        "builder: {strategy: prefix_merging}\nevaluator:\n"
        "  {strategy: session_completed, refresh_runtime: true}\n"
    )
    assert load_task(path).runtime.prepare == ("git init -q",)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"gpus": 2}, "runtime.gpus"),
        ({"storage_mb": 100}, "runtime.storage_mb"),
        ({"kwargs": {"volumes": ["/:/host"]}}, "runtime.kwargs"),
        ({"internet_volumes": ["/run/proxy"]}, "runtime.internet_volumes"),
        ({"import_path": "a.b:C"}, "runtime.import_path"),
        ({"direct_exec_init_command": "service start"}, "runtime.direct_exec_init_command"),
        ({"prepare": [action(type="upload_file", source="/etc/shadow", target="/x")]}, "upload_file"),
        ({"eval_prepare": [action(type="upload_dir", source="/", target="/x")]}, r"runtime.eval_prepare\[0\]"),
        ({"prepare": [action("true", max_attempts=11)]}, "max_attempts"),
        ({"prepare": [action("true", retry_backoff_seconds=-1.0)]}, "retry_backoff_seconds"),
        ({"prepare": [action("true", env={"a b": "1"})]}, "no name of a variable"),
        ({"prepare": [action("true", target="/x")]}, "target"),
        ({"prepare": [action(None)]}, "command"),
        ({"prepare": [action("true", type="run")]}, "type"),
        ({"prepare": [1]}, "prepare"),
        ({"gpu": 0}, "gpu"),
    ],
)
def test_what_can_not_be_done_is_refused_in_one_line(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as error:
        parse_task(dumped(runtime=runtime(**fields)))
    assert "\n" not in str(error.value)


def test_their_first_example_is_refused_for_its_files_and_its_version_and_taken_without() -> None:
    task = calculator()
    with pytest.raises(UsageError, match=r"runtime\.prepare\[1\]: upload_file can't be had.*exec step"):
        parse_task(task)
    task["runtime"]["prepare"] = []
    with pytest.raises(UsageError, match=r"agent\.settings\.version"):
        parse_task(task)
    taken = parse_task(possible())
    assert len(taken.runtime.prepare) == 4
    assert taken.evaluator.config == {
        "test_command": TEST_LINE,
        "timeout_seconds": 60.0,
        "expected_output_json": {"test_calculator": "PASSED"},
    }
    assert make_evaluator(taken.evaluator).name == "test_on_output"
    plan = make_harness(taken.agent).plan(
        taken.agent, taken.instruction, Endpoint("http://x", "k", "m", 1), Installed("1", Path("/bin/codex"))
    )
    assert 'model_reasoning_effort = "xhigh"' in plan.files["~/.codex/config.toml"]


@pytest.mark.parametrize(
    ("config", "gives"),
    [
        ({"expected_output_json": '{"test_a": "PASSED"}'}, {"expected_output_json": {"test_a": "PASSED"}}),
        ({"apply_timeout": 60.0, "patch_command": None, "exclude_patterns": None}, {}),
        ({"patch_command": f"cd '{WORKSPACE}/' && git diff --binary --submodule=diff"}, {}),
        ({"patch_command": "git diff HEAD"}, {}),
        ({"exclude_patterns": ["**/__pycache__/**", "*.pyc", ".config/opencode/**"]}, {}),
        ({"repo_dir": f"{WORKSPACE}/a b"}, {"test_command": f"cd '{WORKSPACE}/a b' || exit\n{TEST_LINE}"}),
    ],
)
def test_how_a_patch_is_made_asks_for_nothing_where_all_of_the_work_is_carried(
    config: dict[str, Any], gives: dict[str, Any]
) -> None:
    config = {"patch_command": None, **config}
    base = {"test_command": TEST_LINE, "timeout_seconds": 60.0, "expected_output_json": {"test_calculator": "PASSED"}}
    taken = parse_task(possible(**config)).evaluator
    assert taken.config == base | gives
    make_evaluator(taken)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"patch_command": f"cd {WORKSPACE} && git diff -- src"}, "patch_command.*eval_prepare"),
        ({"patch_command": "cd /elsewhere && git add -A && git diff"}, "patch_command"),
        ({"patch_command": "git diff; rm -r tests"}, "patch_command"),
        ({"patch_command": 1}, "patch_command"),
        ({"exclude_patterns": [".codex/**", "tests/**"]}, r"exclude_patterns has 'tests/\*\*'.*eval_prepare"),
        ({"exclude_patterns": [1]}, "exclude_patterns"),
        ({"exclude_patterns": "tests"}, "exclude_patterns"),
        ({"repo_dir": "/testbed", "patch_command": None}, r"repo_dir '/testbed'.*runtime\.workdir"),
        ({"repo_dir": f"{WORKSPACE}/../x", "patch_command": None}, "repo_dir"),
        ({"repo_dir": f"{WORKSPACE}s", "patch_command": None}, "repo_dir"),
        ({"timeout_seconds": 5}, "test_timeout"),
        ({"expected_output_json": "{test"}, "expected_output_json is no JSON"),
    ],
)
def test_what_would_be_kept_from_the_tests_is_refused_by_name(config: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word) as error:
        parse_task(possible(**config))
    assert "\n" not in str(error.value)


def test_an_expectation_that_is_no_object_is_refused_by_the_evaluator() -> None:
    taken = parse_task(possible(expected_output_json="[1]")).evaluator
    with pytest.raises(UsageError, match="expected_output_json"):
        make_evaluator(taken)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"agent": agent(harness="openclaw")}, "openclaw .*not in this version"),
        ({"agent": agent(harness="hermes")}, "hermes .*not in this version"),
        ({"agent": agent(harness="swe_agent")}, "swe_agent .*not in this version"),
        ({"evaluator": {"strategy": "swebench_harness", "config": {}}}, "swebench_harness .*not in this version"),
        ({"evaluator": {"strategy": "harbor"}}, "harbor .*not in this version"),
    ],
)
def test_what_is_not_there_yet_is_refused_by_name(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_task(dumped(**fields))


def run(line: str, folder: Path) -> str:
    found = subprocess.run(
        ["bash", "--noprofile", "--norc", "-o", "pipefail", "-c", line], cwd=folder, capture_output=True, text=True
    )
    return f"{found.returncode} {found.stdout.strip()}"


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (action("echo $((1 + 1))"), "0 2"),
        (action("pwd", cwd="in here"), "0 {}/in here"),
        (action("true", cwd="not there"), "1 "),
        (action('echo "$A"', env={"A": "it's $HOME"}), "0 it's $HOME"),
        (action("cat <<X\nhere\nX\n"), "0 here"),
        (action("echo x >> tries; exit 4", max_attempts=3), "4 "),
        (action("echo x >> tries; [ $(wc -l < tries) = 2 ]", max_attempts=5, retry_backoff_seconds=0.01), "0 "),
        (action("cat <<X\nhere\nX", max_attempts=2), "0 here"),
    ],
)
def test_a_step_does_what_it_says(step: dict[str, Any], says: str, tmp_path: Path) -> None:
    (tmp_path / "in here").mkdir()
    (line,) = parse_task(dumped(runtime=runtime(prepare=[step]))).runtime.prepare
    assert run(line, tmp_path) == says.format(tmp_path)
    if "tries" in step["command"]:
        assert (tmp_path / "tries").read_text() == "x\n" * (3 if "exit 4" in step["command"] else 2)


def test_their_agents_are_taken() -> None:
    servers = [
        {"name": "a", "transport": "stdio", "command": "serve", "args": ["-x"], "url": None},
        {"name": "b", "transport": "streamable-http", "command": None, "args": [], "url": "http://127.0.0.1:1/mcp"},
    ]
    task = parse_task(dumped(agent=agent(mcp_servers=servers)))
    assert task.agent.mcp_servers == (
        {"name": "a", "command": "serve", "args": ["-x"]},
        {"name": "b", "args": [], "url": "http://127.0.0.1:1/mcp"},
    )
    shell = {"command": "echo {{INSTRUCTION}}", "cwd": "sub", "env": {"A": "1"}}
    task = parse_task(dumped(agent=agent(harness="shell", custom_shell=shell)))
    harness = make_harness(task.agent)
    installed = harness.find()
    assert installed is not None
    command = harness.plan(task.agent, task.instruction, Endpoint("http://x", "k", "m", 1), installed).command
    assert (command.argv, command.cwd, command.env) == ("echo 'do it'", "sub", {"A": "1"})
    bare = {"command": "true", "cwd": None, "env": None}
    assert parse_task(dumped(agent=agent(harness="shell", custom_shell=bare))).agent.custom_shell is not None


@pytest.mark.parametrize(
    "server",
    [
        {"name": "a", "transport": "sse", "command": None, "args": [], "url": "http://x"},
        {"name": "a", "transport": "stdio", "command": None, "args": [], "url": None},
        {"name": "a", "transport": ["x"], "command": None},
    ],
)
def test_servers_that_can_not_be_had_are_refused(server: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"agent\.mcp_servers\[0\]"):
        parse_task(dumped(agent=agent(mcp_servers=[server])))


# ---- what they read --------------------------------------------------------------------------------------


async def test_their_bridge_submits_with_its_token_and_polls_without(make_world: MakeWorld) -> None:
    world = await make_world(anonymous="read")
    await world.join()
    client = world.as_("nobody")
    token = {"X-Polar-Control-Token": TOKENS["submit"]}
    for body in (dumped(), dumped("p-2", runtime=runtime(backend="docker"))):
        answer = await client.post("/rollout/task/submit", json=body, headers=token)
        assert answer.json() == {"task_id": body["task_id"], "status": "running"}, answer.text
    assert (await client.post("/rollout/task/submit", json=dumped("p-3"))).status_code == 403
    for lease in await world.claim():
        await world.finish(lease, metadata=lease["task"]["metadata"])
    status = msgspec.json.decode((await client.get("/rollout/task/p-1")).content, type=Status)
    (result,) = status.results
    assert (status.status, status.total_sessions, status.completed_sessions) == ("completed", 1, 1)
    assert result.metadata["group_id"] == 3
    assert [trace.loss_mask for trace in result.trajectory.traces] == [[1] * 4, [1] * 4]


async def test_sessions_that_ended_badly_parse_too(world: World) -> None:
    await world.join()
    await world.submit(dumped(num_samples=3))
    first, second, _ = await world.claim(room=2) + [None]
    assert first is not None
    assert second is not None
    await world.finish(first, status="TIMEOUT", error="the agent was stopped after 300 s")
    await world.finish(second, status="ERROR", error="no model call", calls=0, reward=None)
    await world.as_("submit").delete("/rollout/task/p-1")
    status = msgspec.json.decode((await world.admin.get("/rollout/task/p-1")).content, type=Status)
    assert {result.status for result in status.results} == {"TIMEOUT", "ERROR"}
    assert len(status.results) == 3
    for result in status.results:
        assert result.trajectory.status == result.status
        assert result.error


def trained(result: Result, trace: Trace) -> tuple[list[int], float] | None:
    """What their bridge makes of a trace: the mask and the reward that it trains with; None where it leaves it out.

    A session that timed out counts only if the agent's own time ended in its execution and the trace says that it is
    to be trained; its reward is 0 then. Another session that has an error is left out, and so is a trace whose mask
    has no 1. No reward is a reward of 0.
    """
    agent, told = result.trajectory.metadata.get("agent_result"), trace.metadata.get("training_filter")
    agent, told = agent if isinstance(agent, dict) else {}, told if isinstance(told, dict) else {}
    evaluation = result.trajectory.metadata.get("evaluation")
    timed_out = (
        result.status == result.trajectory.status == "TIMEOUT"
        and (agent.get("status"), agent.get("timeout_source"), agent.get("timeout_stage"))
        == ("timeout", "agent", "exec")
        and (told.get("reason"), told.get("trainable")) == ("agent_timeout", True)
        and told.get("masked") is not True
        and not (isinstance(evaluation, dict) and evaluation.get("verifier_timeout") is True)
    )
    bad = result.status != "COMPLETED" or result.trajectory.status != "COMPLETED" or result.error
    if (bad and not timed_out) or not any(trace.loss_mask):
        return None
    return trace.loss_mask, 0.0 if timed_out else trace.reward or 0.0


async def ended(world: World, agent_result: dict[str, Any] | None = None, **fields: Any) -> Result:
    """A session of two calls of the agent's, and one on the side, which a node hands over; as a client gets it."""
    await world.join()
    await world.submit(dumped())
    (lease,) = await world.claim()
    of = {"session_id": lease["session_id"], "attempt": lease["attempt"]}
    alone = {"parent_id": None, "base_id": None, "shared": 0, "shared_messages": 0}
    first, second, title = (making.completion(seq=seq, **of) for seq in range(3))
    title = msgspec.structs.replace(
        title, tools=(), prompt_delta=first.prompt_delta, messages=first.messages, **alone
    )
    told = making.result(task_id="p-1", **of, **fields)
    told.trajectory.metadata |= {"agent_result": agent_result} if agent_result else {}
    for delivery in (Delivery(**of, completions=[first, second, title]), Delivery(**of, result=told)):
        await world.node("/nodes/n1/deliveries", delivery)
    answer = await world.admin.get("/rollout/task/p-1")
    (found,) = msgspec.json.decode(answer.content, type=Status).results
    return found


LATE = {"status": "TIMEOUT", "error": "the agent was stopped after 300 s"}


async def test_what_is_sampled_on_the_side_is_not_trained_as_a_failure(world: World) -> None:
    found = await ended(world)
    assert [trained(found, trace) for trace in found.trajectory.traces] == [([1] * 4, 1.0), ([1] * 4, 1.0), None]
    title = found.trajectory.traces[2]
    assert title.metadata["training_filter"] == {"reason": "auxiliary", "trainable": False, "masked": True}
    assert (title.loss_mask, title.response_logprobs, title.reward) == ([0] * 4, [0.0] * 4, None)
    assert found.trajectory.metadata["reconstruction"]["tokens_trained"] == 8


async def test_what_was_sampled_on_the_side_is_whole_where_nobody_trains_unasked(world: World) -> None:
    await ended(world)
    built = await world.get("/sessions/p-1-0/trajectory")
    rows = [json.loads(line) for line in (await world.admin.get("/rollout/task/p-1/traces.jsonl")).text.splitlines()]
    for traces in (built["traces"], rows):
        assert [trace["loss_mask"] for trace in traces] == [[1] * 4] * 3
        assert traces[2]["role"] == "auxiliary"
        assert traces[2]["response_logprobs"] == [-0.5] * 4


async def test_an_agent_that_ran_out_of_its_own_time_is_trained(world: World) -> None:
    source = {"status": "timeout", "timeout_source": "agent", "timeout_stage": "exec"}
    found = await ended(world, source, **LATE)
    assert found.trajectory.metadata["agent_result"] == source
    assert [trained(found, trace) for trace in found.trajectory.traces] == [([1] * 4, 0.0), ([1] * 4, 0.0), None]


@pytest.mark.parametrize(
    "source", [None, {"status": "timeout", "timeout_source": "session", "timeout_stage": "exec"}]
)
async def test_a_session_whose_whole_time_was_over_is_not_trained(
    world: World, source: dict[str, Any] | None
) -> None:
    found = await ended(world, source, **LATE)
    assert [trained(found, trace) for trace in found.trajectory.traces] == [None] * 3


async def test_an_agent_that_failed_after_its_time_is_not_trained(world: World) -> None:
    source = {"status": "timeout", "timeout_source": "agent", "timeout_stage": "exec"}
    found = await ended(world, source, status="ERROR", error="the evaluation's sandbox failed")
    assert [trained(found, trace) for trace in found.trajectory.traces] == [None] * 3
    assert "training_filter" not in found.trajectory.traces[0].metadata


async def test_a_task_that_was_cancelled_says_so(world: World) -> None:
    await world.submit(dumped())
    answer = await world.as_("submit").delete("/rollout/task/p-1")
    assert answer.json()["status"] == "cancelled"
    assert (await world.get("/rollout/task/p-1"))["status"] == "cancelled"


async def test_their_callback_listener_takes_ours(make_world: MakeWorld) -> None:
    async with Receiver() as trainer:
        world = await make_world(callbacks=CallbackConfig())
        await world.join()
        await world.run(dumped(num_samples=2, callback_url=f"{trainer.url}/callback/task_result"))
        ((_, _, body),) = await trainer.wait(1)
    told = msgspec.json.decode(body, type=Called)
    assert (told.task_id, told.status, len(told.results)) == ("p-1", "completed", 2)


async def test_the_same_task_in_their_words_and_in_ours_is_one(world: World) -> None:
    """A client that writes out every field may hand a task in again that was handed in without them."""
    theirs = dumped(agent=agent(harness="codex"), metadata={})
    ours = {
        "task_id": "p-1",
        "instruction": "do it",
        "timeout_seconds": 600,
        "agent": {"harness": "codex", "model_name": "m"},
        "builder": {"strategy": "per_request"},
    }
    await world.submit(theirs)
    await world.submit(ours)
