"""Why: clients of NVIDIA's public service write out every field that their models have, most of them empty, and
some in another shape than ours. A task of theirs is put into our words here, before it is checked: what asks for
nothing is left out, what we can do is done, and what we can't do is refused by name, never passed over in silence.

A step of ``runtime.prepare`` or ``eval_prepare`` may be an object there: a command with a folder, an environment and
a number of tries. It becomes the shell text that does this.
"""

from __future__ import annotations

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
        raise UsageError(f"{where}: {step['type']} can't be had here: a task can't read files of the host, use exec")
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
