"""Gemini CLI on Node. Its exit code is an HTTP status modulo 256, and 0 after answers that it could not use: its
last event says how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.packages import NpmPackage, node
from polar.harnesses.plans import (
    INSTRUCTION_FILE,
    check_agent,
    judge_by_result,
    last_event,
    last_words,
    mcp_config,
    with_instruction,
)
from polar.harnesses.servers import announcing, judge_servers, named_in_stderr

SKILLS = ".gemini/skills"
FAILED = "(Error during discovery for|Fatal error ensuring) MCP server"
LOST = rf"{FAILED.replace('(', '(?:')} '([^']+)'"
BELIEVED_CONTEXT = 1048576
"""Tokens that it believes a model of unknown name to take."""


class GeminiCLI:
    """Gemini CLI, headless, everything allowed."""

    name = "gemini_cli"
    pinned: str | None = "0.61.0"
    install_hint = "polar doctor --fix gemini_cli"
    package = NpmPackage("gemini_cli", "@google/gemini-cli/bundle/gemini.js", "gemini", node=(20, 0))

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name, takes=["mcp_servers", "skills_path"])

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        line = [node(), str(installed.executable), "-m", endpoint.model, "--approval-mode", "yolo", "--skip-trust"]
        line += ["--output-format", "stream-json"]
        settings = _settings(endpoint)
        settings["mcpServers"] = mcp_config(agent, remote={}, url="httpUrl")
        return Plan(
            Command(
                _telling(announcing(with_instruction(line, agent, SKILLS), agent), agent),
                env={"GEMINI_CLI_NO_RELAUNCH": "true"},
            ),
            files={"~/.gemini/settings.json": json.dumps(settings), f"~/{INSTRUCTION_FILE}": instruction},
        )

    def judge(self, result: ExecResult) -> str | None:
        def why(end: Mapping[str, Any]) -> str | None:
            if end.get("status") == "success":
                return None
            error = end.get("error") or last_event(result.stdout, ["error"]) or {}
            return f": {error.get('message') or last_words(result)}"

        lost = named_in_stderr(result, LOST)
        return judge_by_result(self.name, result, why) or judge_servers(self.name, result, lost)


def _telling(run: str, agent: AgentSpec) -> str:
    """The same, and what its debug log has on servers that did not start: elsewhere it only says that something is
    the matter with one."""
    if not agent.mcp_servers:
        return run
    log = "GEMINI_DEBUG_LOG_FILE"
    return f'export {log}="$HOME/.polar/gemini.log"; {run}; code=$?; grep -saE "{FAILED}" "${log}" >&2; exit $code'


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "model": {
            # Its question whether it goes round in circles is one for another model.
            "disableLoopDetection": True,
            "compressionThreshold": endpoint.context_length / 2 / BELIEVED_CONTEXT,
        },
    }
