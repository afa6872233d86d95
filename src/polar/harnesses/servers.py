"""Whether the MCP servers of a task were there. A command line whose server does not start goes on without its tools,
and says so in passing at most: the session would be one of another task, and look well.

Which servers the task asked for stands in the first line of the output: a workspace may bring servers of its own, and
whether those start is the harness's business.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

from polar.contract.runtime import ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.plans import EVENTS, mcp_servers, tail

ANNOUNCED = "polar.mcp_servers"
BEGIN = 1 << 20
"""The event with which a harness begins is within this many bytes of its output."""
UNDER_WAY = frozenset({"connected", "connecting", "pending"})


def announcing(run: str, agent: AgentSpec) -> str:
    """A shell line that says first, on stdout, which MCP servers the agent has."""
    names = [server.name for server in mcp_servers(agent)]
    return f"echo {shlex.quote(json.dumps({'type': ANNOUNCED, 'names': names}))} && {run}" if names else run


def judge_servers(name: str, result: ExecResult, lost: Collection[str]) -> str | None:
    """The judgement on a harness that ran without some servers.

    Args:
        lost: the servers that did not start, whoever asked for them.
    """
    asked = [named for event in _first_events(result.stdout, ANNOUNCED) for named in event.get("names", ())]
    if not (missing := [each for each in asked if each in lost]):
        return None
    return f"{name} ran without its MCP server {', '.join(missing)}: it did not start, or could not be reached"


def not_connected(stdout: Path) -> set[str]:
    """The servers that a first event of type ``system`` says are not there, as Claude Code and Qwen Code write it."""
    begun = [event for event in _first_events(stdout, "system") if event.get("subtype") == "init"]
    servers = [server for event in begun for server in event.get("mcp_servers") or ()]
    return {server.get("name") for server in servers if server.get("status") not in UNDER_WAY}


def named_in_stderr(result: ExecResult, pattern: str) -> set[str]:
    """The servers that a pattern finds in what a harness said on stderr."""
    return set(re.findall(pattern, tail(result.stderr, EVENTS).decode(errors="replace")))


def _first_events(stdout: Path, kind: str) -> list[dict[str, Any]]:
    try:
        with stdout.open("rb") as file:
            lines = file.read(BEGIN).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("type") == kind:
            found.append(event)
    return found
