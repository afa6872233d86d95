"""What every harness's plan has to do with an agent spec, said once."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from polar.contract.errors import UsageError
from polar.contract.misspelt import explained
from polar.contract.runtime import ExecResult, Runtime
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint

LIFECYCLE_SETTINGS = frozenset({"allow_no_model_call"})
FRAMES = re.compile("\x1b\\[[0-9;]*m|[\u2500-\u257f\u2771]")
"""Colors and the boxes that command lines draw around their errors."""
HELP = re.compile(r"^\s*(-h, )?--help\b", re.MULTILINE)
INSTRUCTION_FILE = ".polar/instruction.md"
"""Under HOME: an instruction in a file may be of any length and begin with any character."""
EVENTS = 16 << 20
"""The last event of a run begins within this many bytes of the end of its output."""


class McpServer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of ``agent.mcp_servers``: a command to start inside the sandbox, or the URL of one that runs."""

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str | None = None


def check_agent(
    agent: AgentSpec, name: str, *, settings: Collection[str] = (), takes: Collection[str] = ()
) -> Mapping[str, object]:
    """Refuse what this harness would silently ignore; the settings it has.

    Args:
        settings: the names that it knows in ``agent.settings``.
        takes: which of ``mcp_servers``, ``skills_path`` and ``custom_shell`` it has a use for.

    Raises:
        UsageError: naming the field.
    """
    known = {*settings, *LIFECYCLE_SETTINGS}
    if unknown := sorted(set(agent.settings) - known):
        raise UsageError(f"agent.settings.{unknown[0]} is not known to {name}: it has {', '.join(sorted(known))}")
    if agent.mcp_servers and "mcp_servers" not in takes:
        raise UsageError(f"agent.mcp_servers: {name} takes no MCP servers")
    mcp_servers(agent)
    if agent.skills_path is not None and "skills_path" not in takes:
        raise UsageError(f"agent.skills_path: {name} takes no skills")
    if agent.custom_shell is not None and "custom_shell" not in takes:
        raise UsageError(f"agent.custom_shell goes with harness: shell, not with {name}")
    return agent.settings


def mcp_servers(agent: AgentSpec) -> list[McpServer]:
    """The agent's MCP servers.

    Raises:
        UsageError: one of them is not well formed.
    """
    servers: dict[str, McpServer] = {}
    for index, given in enumerate(agent.mcp_servers):
        where = f"agent.mcp_servers[{index}]"
        try:
            server = msgspec.convert(given, McpServer)
        except msgspec.ValidationError as error:
            raise UsageError(f"{where}: {explained(error, McpServer)}") from None
        if not re.fullmatch(r"[A-Za-z0-9_-]+", server.name) or server.name in servers:
            raise UsageError(f"{where}.name {server.name!r} must be letters, digits, _ and -, and used once")
        if (server.command is None) == (server.url is None):
            raise UsageError(f"{where} must have either command or url")
        servers[server.name] = server
    return list(servers.values())


def mcp_config(agent: AgentSpec, *, remote: Mapping[str, str], url: str) -> dict[str, Any]:
    """The agent's MCP servers in the form that most command lines share: an object by their names.

    Args:
        remote: what else to say of a server with a URL.
        url: the name of the field that its URL goes into.
    """
    return {
        server.name: {"command": server.command, "args": server.args, "env": server.env}
        if server.url is None
        else {**remote, url: server.url}
        for server in mcp_servers(agent)
    }


def with_instruction(line: Sequence[str], agent: AgentSpec, skills: str) -> str:
    """A shell line that runs a command with the instruction's file as its standard input.

    Args:
        line: the command; words that begin with ``~/`` are paths under HOME.
        skills: the folder under HOME where the command looks for skills: the agent's are copied there first.
    """
    words = [f'"$HOME/{word[2:]}"' if word.startswith("~/") else shlex.quote(word) for word in line]
    run = f'{" ".join(words)} < "$HOME/{INSTRUCTION_FILE}"'
    if agent.skills_path is None:
        return run
    copy = f'cp -R {shlex.quote(agent.skills_path)}/. "$HOME/{skills}"'
    return f'mkdir -p "$HOME/{skills}" && {copy} && {run}'


def standard_env(
    endpoint: Endpoint,
    *,
    session_id: str,
    task_id: str,
    runtime: Runtime | None = None,
    folder: str | Path | None = None,
) -> dict[str, str]:
    """The environment that every harness and every captured command gets.

    Args:
        runtime: the sandbox, whose HOME has the session's folders.
        folder: where the session's folders are, where there is no sandbox.
    """
    if folder is None:
        folder = f"{runtime.home}/session" if runtime else "."
    openai = f"{endpoint.url}/v1"
    hosts = dict.fromkeys(["127.0.0.1", "localhost", "::1", urlsplit(endpoint.url).hostname or "127.0.0.1"])
    no_proxy = ",".join(hosts)
    return {
        "OPENAI_BASE_URL": openai,
        "OPENAI_API_BASE": openai,
        "OPENAI_API_KEY": endpoint.api_key,
        "ANTHROPIC_BASE_URL": endpoint.url,
        "ANTHROPIC_API_KEY": endpoint.api_key,
        "GOOGLE_GEMINI_BASE_URL": endpoint.url,
        "GEMINI_API_KEY": endpoint.api_key,
        "GOOGLE_API_URL": endpoint.url,
        "GOOGLE_API_KEY": endpoint.api_key,
        "POLAR_SESSION_ID": session_id,
        "SESSION_ID": session_id,
        "TASK_ID": task_id,
        "SESSION_DIR": str(folder),
        "ARTIFACTS_DIR": f"{folder}/artifacts",
        "AGENT_LOG_DIR": f"{folder}/logs",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


def last_words(result: ExecResult, limit: int = 300) -> str:
    """The end of what a command said, stderr before stdout, on one line. Where that is its help, the reason
    stands in its first line."""
    for path in (result.stderr, result.stdout):
        said = FRAMES.sub(" ", tail(path, 4096).decode(errors="replace"))
        text = " ".join(said.split())
        if HELP.search(said):
            return f"{_first_line(path)[:limit]} ... {text[-limit // 3 :]}"
        if text:
            return text[-limit:]
    return "it said nothing"


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4096).decode(errors="replace").strip().partition("\n")[0]


def last_event(stdout: Path, kinds: Collection[str]) -> dict[str, Any] | None:
    """The last line of JSON whose ``type`` is one of these."""
    for line in reversed(tail(stdout, EVENTS).splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("type") in kinds:
            return event
    return None


def judge_by_result(name: str, result: ExecResult, why: Callable[[Mapping[str, Any]], str | None]) -> str | None:
    """The judgement on a harness whose last event, a ``result``, says how it ended.

    Args:
        why: what that event says of a failure; ``None`` where it says that all went well.
    """
    end = last_event(result.stdout, ["result"])
    if end is None:
        return f"{name} ended with exit code {result.exit_code} and no result: {last_words(result)}"
    if words := why(end):
        return f"{name} could not go on{words}"
    if result.exit_code != 0:
        return f"{name} ended with exit code {result.exit_code}: {last_words(result)}"
    return None


def tail(path: Path, size: int) -> bytes:
    """The last ``size`` bytes of a file; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read()
    except OSError:
        return b""
