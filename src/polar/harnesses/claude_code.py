"""Claude Code, a native program that speaks Anthropic Messages. Its last event says how it ended: an error of the
API is a result of subtype ``success`` with ``is_error``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.packages import NpmPackage
from polar.harnesses.plans import (
    INSTRUCTION_FILE,
    check_agent,
    judge_by_result,
    mcp_config,
    with_instruction,
)
from polar.harnesses.servers import announcing, judge_servers, not_connected

MCP_FILE = ".polar/mcp.json"
SKILLS = ".claude/skills"
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
}
ONE_PREFIX = {
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
}
"""Tools that are loaded on the way, and a system prompt with a hash of the first message in it, would make one
conversation several traces."""
OWN_SKILLS = {"CLAUDE_CODE_DISABLE_BUNDLED_SKILLS": "1", "SLASH_COMMAND_TOOL_CHAR_BUDGET": "40000"}
"""The list of skills has room for some 5,000 characters, which its own take first: a task's would be named without a
word on what they are for."""
TOLD_FROM = 65536
"""Tokens of context from which it is told how many there are. It keeps some 30,000 of them free and needs 20,000
for its own prompt: in less it would compact before every turn and call that thrashing. Untold, it compacts when
the gateway says that a prompt is too long."""


class ClaudeCode:
    """Claude Code in print mode."""

    name = "claude_code"
    pinned: str | None = "2.1.332"
    install_hint = "polar doctor --fix claude_code"
    package = NpmPackage("claude_code", "@anthropic-ai/claude-code-linux-*/claude", "claude")

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name, takes=["mcp_servers", "skills_path"])

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        files = {f"~/{INSTRUCTION_FILE}": instruction}
        line = [str(installed.executable), "-p", "--output-format", "stream-json", "--verbose"]
        line.append("--dangerously-skip-permissions")
        if agent.mcp_servers:
            servers = mcp_config(agent, remote={"type": "http"}, url="url")
            files[f"~/{MCP_FILE}"] = json.dumps({"mcpServers": servers})
            line += ["--strict-mcp-config", "--mcp-config", f"~/{MCP_FILE}"]
        run = announcing(with_instruction(line, agent, SKILLS), agent)
        own_skills = OWN_SKILLS if agent.skills_path is not None else {}
        return Plan(Command(run, env=_env(endpoint) | own_skills), files=files)

    def judge(self, result: ExecResult) -> str | None:
        lost = not_connected(result.stdout)
        return judge_by_result(self.name, result, _why) or judge_servers(self.name, result, lost)


def _why(end: Mapping[str, Any]) -> str | None:
    if not end.get("is_error") and end.get("subtype") == "success":
        return None
    kind = "" if end.get("subtype") == "success" else f" ({end.get('subtype')})"
    return f"{kind}: {end.get('result') or end.get('errors') or 'no message'}"


def _env(endpoint: Endpoint) -> dict[str, str]:
    context = endpoint.context_length
    return {
        **QUIET,
        **ONE_PREFIX,
        "IS_SANDBOX": "1",  # else it refuses to skip permissions as root, where there are no walls
        "ANTHROPIC_MODEL": endpoint.model,
        **{f"ANTHROPIC_DEFAULT_{family}_MODEL": endpoint.model for family in ("OPUS", "SONNET", "HAIKU")},
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(32000, context // 4)),
        **({"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context)} if context >= TOLD_FROM else {}),
    }
