"""opencode, a native program that speaks any dialect through its bundled AI SDK. Its exit code is 1 after an error
of the API, but its events tell more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polar.contract.errors import UsageError
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
from polar.harnesses.servers import announcing, judge_servers, named_in_stderr

PROVIDER = "polar"
SKILLS = ".config/opencode/skills"
APIS = {
    "openai-compatible": "/v1",
    "openai": "/v1",
    "anthropic": "/v1",
    "google": "/v1beta",
}
"""Packages of the AI SDK, and the path that each wants in its base URL."""
DEFAULT_API = "openai-compatible"
TELLING = {"OPENCODE_PRINT_LOGS": "1", "OPENCODE_LOG_LEVEL": "WARN"}
LOST = r'message="server unavailable" key=(\S+)'
"""All that it says of an MCP server that is not there."""


class OpenCode:
    """``opencode run``. ``settings.api`` picks the dialect it speaks."""

    name = "opencode"
    pinned: str | None = "1.18.33"
    install_hint = "polar doctor --fix opencode"
    package = NpmPackage("opencode", "opencode-linux-*/bin/opencode", "opencode")

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        settings = check_agent(agent, self.name, settings=["api"], takes=["mcp_servers", "skills_path"])
        if (api := str(settings.get("api", DEFAULT_API))) not in APIS:
            raise UsageError(f"agent.settings.api {api!r} is not known to opencode: it has {', '.join(APIS)}")
        return settings

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        api = str(self.check(agent).get("api", DEFAULT_API))
        line = [str(installed.executable), "run", "-m", f"{PROVIDER}/{endpoint.model}", "--format", "json"]
        line += ["--title", "polar"]  # else the model is asked for one
        config = _config(api, endpoint)
        config["mcp"] = {server.name: _server(server) for server in mcp_servers(agent)}
        return Plan(
            Command(
                announcing(with_instruction(line, agent, SKILLS), agent),
                env={
                    **(TELLING if agent.mcp_servers else {}),
                    "OPENCODE_DISABLE_AUTOUPDATE": "1",
                    "OPENCODE_DISABLE_MODELS_FETCH": "1",
                    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                },
            ),
            files={"~/.config/opencode/opencode.json": json.dumps(config), f"~/{INSTRUCTION_FILE}": instruction},
        )

    def judge(self, result: ExecResult) -> str | None:
        end = last_event(result.stdout, ["step_start", "step_finish", "error"])
        if end is not None and end["type"] == "error":
            return f"opencode could not go on: {_words(end.get('error'))}"
        if result.exit_code != 0:
            return f"opencode ended with exit code {result.exit_code}: {last_words(result)}"
        reason = end.get("part", {}).get("reason") if end is not None and end["type"] == "step_finish" else None
        if reason not in ("stop", "length"):
            return f"opencode's output ends before the model's last answer does: {last_words(result)}"
        return judge_servers(self.name, result, named_in_stderr(result, LOST))


def _config(api: str, endpoint: Endpoint) -> dict[str, Any]:
    output = min(8192, endpoint.context_length // 4)
    model = {
        "name": endpoint.model,
        "limit": {"context": endpoint.context_length, "output": output},
        # Google's package takes a name with a slash in it for a whole path.
        "id": f"models/{endpoint.model}" if api == "google" else endpoint.model,
    }
    return {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "provider": {
            PROVIDER: {
                "npm": f"@ai-sdk/{api}",
                "options": {"baseURL": endpoint.url + APIS[api], "apiKey": endpoint.api_key},
                "models": {endpoint.model: model},
            }
        },
    }


def _server(server: McpServer) -> dict[str, Any]:
    if server.url is not None:
        return {"type": "remote", "url": server.url}
    return {"type": "local", "command": [server.command, *server.args], "environment": server.env}


def _words(error: Any) -> str:
    """What an error says: its own message, or the one inside."""
    if isinstance(error, dict):
        data = error.get("data")
        inner = data.get("message") if isinstance(data, dict) else None
        return str(inner or error.get("message") or error.get("name"))
    return str(error)
