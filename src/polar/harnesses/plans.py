"""What every harness's plan has to do with an agent spec, said once."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from polar.contract.errors import UsageError
from polar.contract.runtime import ExecResult, Runtime
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint

LIFECYCLE_SETTINGS = frozenset({"allow_no_model_call"})
FRAMES = re.compile("\x1b\\[[0-9;]*m|[\u2500-\u257f\u2771]")
"""Colors and the boxes that command lines draw around their errors."""
INSTRUCTION_FILE = ".polar/instruction.md"
"""Under HOME: an instruction in a file may be of any length and begin with any character."""


def check_agent(
    agent: AgentSpec, name: str, *, settings: Collection[str] = (), takes_command: bool = False
) -> Mapping[str, object]:
    """Refuse what this harness would silently ignore; the settings it has.

    Raises:
        UsageError: naming the field.
    """
    known = {*settings, *LIFECYCLE_SETTINGS}
    if unknown := sorted(set(agent.settings) - known):
        raise UsageError(f"agent.settings.{unknown[0]} is not known to {name}: it has {', '.join(sorted(known))}")
    if agent.mcp_servers:
        raise UsageError(f"agent.mcp_servers: {name} takes no MCP servers")
    if agent.skills_path is not None:
        raise UsageError(f"agent.skills_path: {name} takes no skills")
    if agent.custom_shell is not None and not takes_command:
        raise UsageError(f"agent.custom_shell goes with harness: shell, not with {name}")
    return agent.settings


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
    """The end of what a command said, stderr before stdout, on one line."""
    for path in (result.stderr, result.stdout):
        text = " ".join(FRAMES.sub(" ", tail(path, 4096).decode(errors="replace")).split())
        if text:
            return text[-limit:]
    return "it said nothing"


def tail(path: Path, size: int) -> bytes:
    """The last ``size`` bytes of a file; nothing where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - size))
            return file.read()
    except OSError:
        return b""
