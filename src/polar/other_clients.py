"""Why: clients of NVIDIA's public service write out every field that their models have, most of them empty, and
some in another shape than ours. A task of theirs is put into our words here, before it is checked: what asks for
nothing is left out, what we can do is done, and what we can't do is refused by name, never passed over in silence.

Their evaluators make a patch of the agent's work and apply it in a fresh sandbox. Ours carry the workspace there as
it is, so what only says how the patch is made asks for nothing, as long as the patch is of the whole repository.

A step of ``runtime.prepare`` or ``eval_prepare`` may be an object there: a command with a folder, an environment and
a number of tries. It becomes the shell text that does this.
"""

from __future__ import annotations

import fnmatch
import json
import posixpath
import re
import shlex
from typing import Any

import msgspec

from polar.contract.errors import UsageError
from polar.contract.task import RuntimeSpec

SECTIONS = ("runtime", "agent", "builder", "evaluator", "sampling")
"""The parts of a task in which a null says as much as nothing."""
INSTEAD = {
    "direct_exec_init_command": "put it into runtime.prepare",
    "storage_mb": "disk is not limited here, leave it out",
    "gpus": "sandboxes have no GPU here, leave it out",
    "internet_volumes": "a task can't mount folders of the host",
    "import_path": "runtimes are chosen by runtime.backend",
    "kwargs": "a task can't hand options to the runtime or mount folders of the host",
}
"""Fields of theirs in ``runtime`` that are refused when they ask for something, and what to do."""
HARNESSES = ("openclaw", "hermes", "swe_agent")
EVALUATORS = ("swebench_harness", "harbor", "harbor_rubric")
"""Theirs that are not in this version."""
LEFT_BEHIND = (".*", "node_modules", "__pycache__", "*.pyc", "*.pyo")
"""Names of what tools leave in a workspace, which is no part of the work: a patch may do without them."""
WHOLE_PATCH = re.compile(
    r"(?:cd (?P<folder>\S+) && )?(?:git add (?:-A|--all|\.) && )?"
    r"git diff(?: (?:HEAD|--cached|--staged|--binary|--full-index|--no-color|--submodule=diff))*"
)
"""A command that makes a patch of a whole repository."""


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of theirs. ``max_attempts`` tries, ``retry_backoff_seconds`` after the first, twice as long after each
    further one."""

    command: str
    type: str = "exec"
    cwd: str | None = None
    env: dict[str, str] = {}
    max_attempts: int = 1
    retry_backoff_seconds: float = 0.0


def in_our_words(task: dict[str, Any]) -> dict[str, Any]:
    """A task as we write it.

    Raises:
        UsageError: it asks for something that can't be had here; the message names the field.
    """
    plain = {name: value for name, value in task.items() if value is not None}
    for name in SECTIONS:
        if isinstance(plain.get(name), dict):
            plain[name] = {key: value for key, value in plain[name].items() if value is not None}
    if isinstance(plain.get("runtime"), dict):
        plain["runtime"] = _runtime(plain["runtime"])
    if isinstance(plain.get("agent"), dict):
        plain["agent"] = _agent(plain["agent"])
    if isinstance(plain.get("evaluator"), dict):
        runtime = plain.get("runtime")
        plain["evaluator"] = _evaluator(plain["evaluator"], runtime if isinstance(runtime, dict) else {})
    return plain


def _runtime(runtime: dict[str, Any]) -> dict[str, Any]:
    ours = dict(runtime)
    for name, instead in INSTEAD.items():
        theirs = name in ours and name not in RuntimeSpec.__struct_fields__
        if theirs and ours.pop(name) not in (0, "", [], {}):
            raise UsageError(f"runtime.{name} can't be had here: {instead}")
    for name in ("prepare", "eval_prepare"):
        if isinstance(ours.get(name), list):
            ours[name] = [_line(step, f"runtime.{name}[{index}]") for index, step in enumerate(ours[name])]
    return ours


def _line(step: Any, where: str) -> Any:
    if not isinstance(step, dict):
        return step
    if step.get("type") in ("upload_file", "upload_dir"):
        raise UsageError(
            f"{where}: {step['type']} can't be had here: a task can't read files of the host: write the "
            "file's text with an exec step"
        )
    try:
        found = msgspec.convert({name: value for name, value in step.items() if value is not None}, Step)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
    if found.type != "exec":
        raise UsageError(f"{where}.type {found.type!r} is not known: it is exec")
    if not 1 <= found.max_attempts <= 10 or not 0 <= found.retry_backoff_seconds <= 60:
        raise UsageError(f"{where}: max_attempts is from 1 to 10, retry_backoff_seconds from 0 to 60")
    return _shell(found, where)


def _shell(step: Step, where: str) -> str:
    """The line of shell that does what a step says: each try in a shell of its own, so that ``exit`` ends the try."""
    before = []
    if step.cwd is not None:
        before.append(f"cd {shlex.quote(step.cwd)} || exit")
    for name, value in step.env.items():
        if not name.isidentifier() or not name.isascii():
            raise UsageError(f"{where}.env: {name!r} is no name of a variable")
        before.append(f"export {name}={shlex.quote(value)}")
    if step.max_attempts == 1:
        return "\n".join([*before, step.command])
    pauses = [f"{step.retry_backoff_seconds * 2**tries:g}" for tries in range(step.max_attempts - 1)]
    tried = f"(\n{step.command}\n)"
    loop = [f"for polar_pause in {' '.join(pauses)}; do", tried, '[ $? = 0 ] && exit; sleep "$polar_pause"; done']
    return "\n".join([*before, *loop, tried])


def _agent(agent: dict[str, Any]) -> dict[str, Any]:
    ours = dict(agent)
    if ours.get("harness") in HARNESSES:
        raise UsageError(
            f"agent.harness {ours['harness']} of NVIDIA's Polar is not in this version: use custom_shell"
        )
    if isinstance(settings := ours.get("settings"), dict) and settings.get("version") is not None:
        raise UsageError(
            "agent.settings.version can't be had here: polar doctor lists each harness's one, leave it out"
        )
    shell, servers = ours.get("custom_shell"), ours.get("mcp_servers")
    if isinstance(shell, dict):
        ours["custom_shell"] = {name: value for name, value in shell.items() if value is not None}
    if isinstance(servers, list):
        ours["mcp_servers"] = [_server(each, f"agent.mcp_servers[{index}]") for index, each in enumerate(servers)]
    return ours


def _server(server: Any, where: str) -> Any:
    """Ours has either a command or a URL, and so no name for the way it is reached."""
    if not isinstance(server, dict) or "transport" not in server:
        return server
    ours = {name: value for name, value in server.items() if value is not None and name != "transport"}
    needs = {"stdio": "command", "streamable-http": "url"}.get(str(server["transport"]))
    if needs is None:
        raise UsageError(f"{where}.transport {server['transport']!r} can't be had here: use stdio or streamable-http")
    if needs not in ours:
        raise UsageError(f"{where}: transport {server['transport']} needs {needs}")
    return ours


def _evaluator(evaluator: dict[str, Any], runtime: dict[str, Any]) -> dict[str, Any]:
    strategy, config = evaluator.get("strategy"), evaluator.get("config")
    if strategy in EVALUATORS:
        raise UsageError(
            f"evaluator.strategy {strategy} of NVIDIA's Polar is not in this version: use test_on_output with the "
            "command that runs its tests"
        )
    if strategy != "test_on_output" or not isinstance(config, dict):
        return evaluator
    ours = {name: value for name, value in config.items() if value is not None}
    if "test_timeout" in ours:
        if "timeout_seconds" in ours:
            raise UsageError("evaluator.config has both test_timeout and timeout_seconds: leave one out")
        ours["timeout_seconds"] = ours.pop("test_timeout")
    if isinstance(expected := ours.get("expected_output_json"), str):
        ours["expected_output_json"] = _expected(expected)
    workdir = runtime.get("workdir")
    _require_whole_work(ours, ours.get("repo_dir", workdir))
    if "repo_dir" in ours:
        _run_in(ours, ours.pop("repo_dir"), workdir)
    return {**evaluator, "config": ours}


def _expected(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"evaluator.config.expected_output_json is no JSON: {error}") from None


def _require_whole_work(config: dict[str, Any], folder: Any) -> None:
    """Take out what says how a patch is made, and refuse what would leave a part of the work out of it."""
    config.pop("apply_timeout", None)
    command, patterns = config.pop("patch_command", None), config.pop("exclude_patterns", [])
    if command is not None:
        whole = WHOLE_PATCH.fullmatch(" ".join(command.split())) if isinstance(command, str) else None
        if whole is None or (whole["folder"] is not None and not _same(whole["folder"], folder)):
            raise UsageError(
                "evaluator.config.patch_command picks parts of the work, but the whole workspace is carried to the "
                "tests: leave it out, and put back in runtime.eval_prepare what the agent may not change"
            )
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        parts = pattern.split("/") if isinstance(pattern, str) else []
        if not any(fnmatch.fnmatchcase(part, name) for part in parts for name in LEFT_BEHIND):
            raise UsageError(
                f"evaluator.config.exclude_patterns has {pattern!r}, but the whole workspace is carried to the "
                "tests: leave it out, and put back in runtime.eval_prepare what the agent may not change"
            )


def _run_in(config: dict[str, Any], folder: Any, workdir: Any) -> None:
    """Run the tests in a folder of the workspace: only the workspace is carried to them."""
    below = (
        isinstance(folder, str)
        and isinstance(workdir, str)
        and f"{posixpath.normpath(folder)}/".startswith(f"{posixpath.normpath(workdir)}/")
    )
    if not below:
        raise UsageError(
            f"evaluator.config.repo_dir {folder!r} is not in the workspace, and only that is carried to the "
            "tests: set runtime.workdir to it"
        )
    if not _same(folder, workdir) and isinstance(config.get("test_command"), str):
        config["test_command"] = f"cd {shlex.quote(folder)} || exit\n{config['test_command']}"


def _same(path: Any, other: Any) -> bool:
    """Whether two absolute paths, as they are written, are one."""
    texts = isinstance(path, str) and isinstance(other, str)
    return texts and posixpath.normpath(path.strip("'\"")) == posixpath.normpath(other)
