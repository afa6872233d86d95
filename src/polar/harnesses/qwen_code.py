"""Qwen Code on Node, which speaks OpenAI Chat. Its last event says how it ended."""

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
    mcp_config,
    with_instruction,
)
from polar.harnesses.servers import announcing, judge_servers, not_connected

SKILLS = ".qwen/skills"
FREE = 33000
"""Tokens that it keeps free for a summary. Of a window that is not larger it takes a share instead."""


class QwenCode:
    """Qwen Code, headless, everything allowed."""

    name = "qwen_code"
    pinned: str | None = "0.24.4"
    install_hint = "polar doctor --fix qwen_code"
    package = NpmPackage("qwen_code", "@qwen-code/qwen-code/cli-entry.js", "qwen", node=(20, 0))

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name, takes=["mcp_servers", "skills_path"])

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        line = [
            node(),
            str(installed.executable),
            "--auth-type",
            "openai",
            "--yolo",
            "--output-format",
            "stream-json",
        ]
        settings = _settings(endpoint)
        settings["mcpServers"] = mcp_config(agent, remote={}, url="httpUrl")
        return Plan(
            Command(
                announcing(with_instruction(line, agent, SKILLS), agent),
                env={"OPENAI_MODEL": endpoint.model, "QWEN_CODE_NO_RELAUNCH": "true"},
            ),
            files={"~/.qwen/settings.json": json.dumps(settings), f"~/{INSTRUCTION_FILE}": instruction},
        )

    def judge(self, result: ExecResult) -> str | None:
        lost = not_connected(result.stdout)
        return judge_by_result(self.name, result, _why) or judge_servers(self.name, result, lost)


def _why(end: Mapping[str, Any]) -> str | None:
    if not end.get("is_error") and end.get("subtype") == "success":
        return None
    error = end.get("error")
    words = error.get("message") if isinstance(error, dict) else error
    return f" ({end.get('subtype')}): {words or end.get('result')}"


def _settings(endpoint: Endpoint) -> dict[str, Any]:
    context = endpoint.context_length
    return {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
        # Agents in the background that take notes for a next session, which there is none of.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "model": {
            "generationConfig": {
                # What little is left of a window that is hardly larger would be less than its own prompt.
                "contextWindowSize": context if context >= 2 * FREE else min(context, FREE),
                # Said here, it is not raised after a reply that was cut off.
                "samplingParams": {"max_tokens": min(8192, context // 4)},
            }
        },
    }
