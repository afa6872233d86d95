"""Codex, a native program that speaks OpenAI Responses. It reads no base URL from its environment: its one
provider is in its config. Its last event says whether the turn was completed."""

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
    McpServer,
    check_agent,
    last_event,
    last_words,
    mcp_servers,
    with_instruction,
)

SKILLS = ".codex/skills"
PROVIDER = "polar"
WAITED_FOR = {"required": True, "startup_timeout_sec": 60}
"""Else it asks the model while a server starts, without its tools."""


class Codex:
    """``codex exec``, without its own sandbox and without questions."""

    name = "codex"
    pinned: str | None = "0.171.0"
    install_hint = "polar doctor --fix codex"
    package = NpmPackage("codex", "@openai/codex-linux-*/vendor/*/bin/codex", "codex")

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name, settings=["reasoning_effort"], takes=["mcp_servers", "skills_path"])

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        settings = self.check(agent)
        line = [str(installed.executable), "exec", "--json", "--skip-git-repo-check"]
        line += ["--dangerously-bypass-approvals-and-sandbox", "-"]
        tables = _config(endpoint)
        if effort := settings.get("reasoning_effort"):
            tables[""]["model_reasoning_effort"] = effort
        tables |= {f"mcp_servers.{server.name}": _server(server) for server in mcp_servers(agent)}
        return Plan(
            Command(with_instruction(line, agent, SKILLS), env={"CODEX_API_KEY": endpoint.api_key}),
            files={"~/.codex/config.toml": _toml(tables), f"~/{INSTRUCTION_FILE}": instruction},
        )

    def judge(self, result: ExecResult) -> str | None:
        end = last_event(result.stdout, ["turn.started", "turn.completed", "turn.failed"])
        if end is not None and end["type"] == "turn.failed":
            error = end.get("error")
            return f"codex could not go on: {error.get('message') if isinstance(error, dict) else error}"
        if result.exit_code != 0:
            return f"codex ended with exit code {result.exit_code}: {last_words(result)}"
        if end is None or end["type"] != "turn.completed":
            return f"codex's output ends before its turn does: {last_words(result)}"
        return None


def _config(endpoint: Endpoint) -> dict[str, dict[str, Any]]:
    return {
        "": {
            "model": endpoint.model,
            "model_provider": PROVIDER,
            "model_context_window": endpoint.context_length,
            # A reply has no limit of its own: it must fit in behind the longest prompt.
            "model_auto_compact_token_limit": endpoint.context_length * 3 // 4,
            "approval_policy": "never",
            "sandbox_mode": "danger-full-access",
            "check_for_update_on_startup": False,
            "web_search": "disabled",
        },
        "analytics": {"enabled": False},
        "feedback": {"enabled": False},
        "features": {"plugins": False},
        f"model_providers.{PROVIDER}": {
            "name": PROVIDER,
            "base_url": f"{endpoint.url}/v1",
            "env_key": "CODEX_API_KEY",
            "wire_api": "responses",
            "supports_websockets": False,
            "stream_idle_timeout_ms": 3_600_000,
        },
    }


def _server(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"url": server.url, **WAITED_FOR}
    return {"command": server.command, "args": list(server.args), "env": server.env, **WAITED_FOR}


def _toml(tables: dict[str, dict[str, Any]]) -> str:
    lines: list[str] = []
    for name, table in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """TOML writes strings, numbers, booleans and lists as JSON does; a table in one line has ``=`` for ``:``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
