"""pi, a small coding agent on Node: one config file, JSON events on stdout, and exit code 0 even when the model
could not be reached, so that its events decide how it ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, ExecResult
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.packages import NpmPackage, node
from polar.harnesses.plans import INSTRUCTION_FILE, check_agent, last_words, tail, with_instruction

PROVIDER = "polar"
SKILLS = ".pi/agent/skills"
BASE_PATHS = {
    "openai-completions": "/v1",
    "openai-responses": "/v1",
    "anthropic-messages": "",
    "google-generative-ai": "/v1beta",
}
DEFAULT_API = "openai-completions"
WITHOUT_PARTIALS = """LC_ALL=C grep -a -v --line-buffered '^{"type":"message_update"'"""
"""Each piece of an answer comes with all of it so far: a long answer would be hundreds of megabytes of log."""
TAIL = 64 << 20
"""The last event holds the whole conversation: it is found within this many bytes."""


class Pi:
    """pi in print mode. ``settings.api`` picks the dialect it speaks."""

    name = "pi"
    pinned: str | None = "0.73.1"
    install_hint = "polar doctor --fix pi"
    package = NpmPackage("pi", "@mariozechner/pi-coding-agent/dist/cli.js", "pi", node=(20, 6))

    def find(self) -> Installed | None:
        return self.package.find()

    def check(self, agent: AgentSpec) -> Mapping[str, object]:
        settings = check_agent(agent, self.name, settings=["api"], takes=["skills_path"])
        if (api := str(settings.get("api", DEFAULT_API))) not in BASE_PATHS:
            raise UsageError(f"agent.settings.api {api!r} is not known to pi: it has {', '.join(BASE_PATHS)}")
        return settings

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        api = self.check(agent).get("api", DEFAULT_API)
        model = {
            "id": endpoint.model,
            "contextWindow": endpoint.context_length,
            "maxTokens": min(8192, endpoint.context_length // 2),
            "reasoning": False,
        }
        provider = {
            "baseUrl": endpoint.url + BASE_PATHS[str(api)],
            "api": api,
            "apiKey": endpoint.api_key,
            "models": [model],
        }
        line = [node(), str(installed.executable), "-p", "--provider", PROVIDER, "--model", endpoint.model]
        run = with_instruction([*line, "--mode", "json"], agent, SKILLS)
        return Plan(
            Command(
                f"{run} | {WITHOUT_PARTIALS}",
                env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
            ),
            files={
                "~/.pi/agent/models.json": json.dumps({"providers": {PROVIDER: provider}}),
                "~/.pi/agent/settings.json": json.dumps({"compaction": _compaction(endpoint.context_length)}),
                f"~/{INSTRUCTION_FILE}": instruction,
            },
        )

    def judge(self, result: ExecResult) -> str | None:
        if result.exit_code != 0:
            return f"pi ended with exit code {result.exit_code}: {last_words(result)}"
        final = _final_answer(result.stdout)
        if final is None:
            return f"pi's output ends before the model answered: {last_words(result)}"
        reason = final.get("stopReason")
        if reason in ("stop", "length"):
            return None
        if reason in ("error", "aborted"):
            return f"pi could not go on ({reason}): {final.get('errorMessage') or 'no message'}"
        return f"pi stopped in the middle of a turn (stopReason {reason!r})"


def _compaction(context_length: int) -> dict[str, int]:
    """pi's own numbers are for large models: on a small one it would summarize after every prompt."""
    return {
        "reserveTokens": min(16384, context_length // 8),
        "keepRecentTokens": min(20000, context_length // 4),
    }


def _final_answer(stdout: Path) -> dict[str, object] | None:
    """The assistant message that the last run of the agent ended with; ``None`` where the end is missing."""
    lines = tail(stdout, TAIL).splitlines()
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        kind = event.get("type") if isinstance(event, dict) else None
        if kind in ("agent_start", "turn_start", "message_start"):
            return None  # it began something that never ended
        if kind == "agent_end":
            answers = [m for m in event.get("messages", ()) if m.get("role") == "assistant"]
            return answers[-1] if answers else None
    return None
