"""Any command as the agent: ``agent.custom_shell.command``, with the instruction put in where it says so."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.plans import check_agent, last_words

MARK = "{{INSTRUCTION}}"


class Shell:
    """A shell string, run with ``pipefail``."""

    name = "shell"
    pinned: str | None = None
    install_hint = "nothing to install: it runs the command of agent.custom_shell"

    def find(self) -> Installed | None:
        return Installed("sh", Path("/bin/sh"))

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        settings = check_agent(agent, self.name, takes=["custom_shell"])
        if agent.custom_shell is None or not agent.custom_shell.command.strip():
            raise UsageError("agent.custom_shell.command is empty: give the command that runs the agent")
        return settings

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        assert agent.custom_shell is not None
        shell = agent.custom_shell
        return Plan(Command(shell.command.replace(MARK, shlex.quote(instruction)), env=shell.env, cwd=shell.cwd))

    def judge(self, result: ExecResult) -> str | None:
        if result.exit_code == 0:
            return None
        return f"the agent's command ended with exit code {result.exit_code}: {last_words(result)}"
