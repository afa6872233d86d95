"""OpenHands, as the SDK's default agent in a script of a few lines: the SDK is a library and has no command. The
script says in its last line and its exit code how the conversation ended."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.packages import PythonPackage
from polar.harnesses.plans import (
    INSTRUCTION_FILE,
    check_agent,
    last_words,
    mcp_config,
    tail,
    with_instruction,
)

CONFIG_FILE = ".polar/openhands.json"
SCRIPT_FILE = ".polar/run_openhands.py"
SKILLS = ".polar/skills"
STATUS = "polar: openhands ended as"
IN_ORDER = frozenset({"finished", "stuck", "paused"})
"""``paused`` is a run that reached its limit of steps: the model's doing, as is going round in circles."""

SCRIPT = f"""
import json, os, sys
from pathlib import Path

from openhands.sdk import AgentContext, Conversation, LLM
from openhands.sdk.mcp.tool import MCPToolDefinition
from openhands.sdk.skills import load_skills_from_dir
from openhands.tools.preset.default import get_default_agent

config = json.loads((Path.home() / "{CONFIG_FILE}").read_text())
agent = get_default_agent(LLM(**config["llm"]), cli_mode=True)
changes = {{}}
if config["mcp"]:
    changes["mcp_config"] = config["mcp"]
skills = Path.home() / "{SKILLS}"
if skills.is_dir():
    found = [skill for kind in load_skills_from_dir(skills) for skill in kind.values()]
    changes["agent_context"] = AgentContext(skills=found)
agent = type(agent)(**{{**dict(agent), **changes}})
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.stdin.read())
failed = None
try:
    conversation.run()
except Exception as error:
    failed = " ".join(f"{{type(error).__name__}}: {{error}}".split())[:500]
if config["mcp"] and not failed:  # without a server it goes on, and only logs that
    tools = [name for name, tool in conversation.agent.tools_map.items() if isinstance(tool, MCPToolDefinition)]
    prefix = "" if len(config["mcp"]) == 1 else "{{}}_"
    lost = [name for name in config["mcp"] if not any(tool.startswith(prefix.format(name)) for tool in tools)]
    failed = lost and "without its MCP server " + ", ".join(lost)
status = failed or conversation.state.execution_status.value
print("\\n{STATUS} " + status, flush=True)
conversation.close()
os._exit(1 if failed else 0)
"""


class OpenHandsSDK:
    """The default agent, in the working folder."""

    name = "openhands_sdk"
    pinned: str | None = "1.58.2"
    install_hint = "polar doctor --fix openhands_sdk"
    package = PythonPackage("openhands_sdk", "openhands_sdk", python=(3, 12))

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name, takes=["mcp_servers", "skills_path"])

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        llm = {
            "model": f"openai/{endpoint.model}",
            "base_url": f"{endpoint.url}/v1",
            "api_key": endpoint.api_key,
            "max_input_tokens": endpoint.context_length * 3 // 4,
            "max_output_tokens": endpoint.context_length // 4,
        }
        servers = mcp_config(agent, remote={}, url="url")
        config = {"llm": llm, "mcp": servers}
        line = [str(installed.executable), f"~/{SCRIPT_FILE}"]
        return Plan(
            Command(
                with_instruction(line, agent, SKILLS),
                env={
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "OPENHANDS_SUPPRESS_BANNER": "1",
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            ),
            files={
                f"~/{CONFIG_FILE}": json.dumps(config),
                f"~/{SCRIPT_FILE}": SCRIPT,
                f"~/{INSTRUCTION_FILE}": instruction,
            },
        )

    def judge(self, result: ExecResult) -> str | None:
        lines = tail(result.stdout, 1 << 16).decode(errors="replace").splitlines()
        ends = [line.removeprefix(STATUS).strip() for line in lines if line.startswith(STATUS)]
        if not ends:
            return f"openhands_sdk ended with exit code {result.exit_code}: {last_words(result)}"
        if result.exit_code != 0 or ends[-1] not in IN_ORDER:
            return f"openhands_sdk could not go on: {ends[-1]}"
        return None
