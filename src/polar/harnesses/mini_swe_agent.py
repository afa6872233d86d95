"""mini-swe-agent: one tool, bash, and a linear history. It ends with exit code 0 also when it gave up, so the
command reads from its trajectory how it ended, and says so in its exit code and its last line."""

from __future__ import annotations

import json
from collections.abc import Mapping

from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.packages import PythonPackage
from polar.harnesses.plans import check_agent, last_words, tail

CONFIG_FILE = ".polar/mini.yaml"
"""Under HOME. JSON is YAML."""
STATUS = "polar: mini-swe-agent ended as"
GAVE_UP = 3
"""Exit code of a run that ended in order without a submission: a run of the model's, not a broken one."""
IN_ORDER = frozenset({"Submitted", "RepeatedFormatError", "LimitsExceeded", "TimeExceeded"})

REPORT = f"""
import json, sys
try:
    status = json.load(open(sys.argv[1]))["info"]["exit_status"]
except (OSError, ValueError, KeyError):
    status = ""
print("\\n{STATUS} " + (status or "nothing"), flush=True)
sys.exit(0 if status == "Submitted" else {GAVE_UP})
"""
SCRIPT = f"""
out="$HOME/.polar/mini.traj.json"
"$1" -m minisweagent.run.mini -c mini.yaml -c "$HOME/{CONFIG_FILE}" -y -l 0 --exit-immediately -o "$out" || exit $?
exec "$1" -c "$2" "$out"
"""


class MiniSweAgent:
    """mini, without questions asked."""

    name = "mini_swe_agent"
    pinned: str | None = "2.4.6"
    install_hint = "polar doctor --fix mini_swe_agent"
    package = PythonPackage("mini_swe_agent", "mini_swe_agent", python=(3, 10), command="mini")

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        return check_agent(agent, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        self.check(agent)
        config = {"run": {"task": instruction}, "model": {"model_name": f"openai/{endpoint.model}"}}
        return Plan(
            Command(
                ["/bin/sh", "-c", SCRIPT, "mini", str(installed.executable), REPORT],
                env={
                    "OPENAI_API_KEY": endpoint.api_key,
                    "OPENAI_API_BASE": f"{endpoint.url}/v1",
                    "MSWEA_CONFIGURED": "true",
                    "MSWEA_COST_TRACKING": "ignore_errors",
                    "MSWEA_SILENT_STARTUP": "1",
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            ),
            files={f"~/{CONFIG_FILE}": json.dumps(config)},
        )

    def judge(self, result: ExecResult) -> str | None:
        lines = tail(result.stdout, 1 << 16).decode(errors="replace").splitlines()
        ends = [line.removeprefix(STATUS).strip() for line in lines if line.startswith(STATUS)]
        if result.exit_code not in (0, GAVE_UP) or not ends:
            return f"mini-swe-agent ended with exit code {result.exit_code}: {last_words(result)}"
        if ends[-1] not in IN_ORDER:
            return f"mini-swe-agent ended as {ends[-1]}"
        return None
