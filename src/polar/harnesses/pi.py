"""pi, a small coding agent on Node: one config file, JSON events on stdout, and exit code 0 even when the model
could not be reached, so that its events decide how it ended."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from polar.contract.errors import UsageError
from polar.contract.runtime import Command, ExecResult, Mount
from polar.contract.task import AgentSpec
from polar.harnesses.base import Endpoint, Installed, Plan
from polar.harnesses.found import harness_folder, interpreter_mounts, on_path
from polar.harnesses.plans import INSTRUCTION_FILE, check_agent, last_words, tail

PACKAGE = Path("@mariozechner/pi-coding-agent")
PROVIDER = "polar"
BASE_PATHS = {
    "openai-completions": "/v1",
    "openai-responses": "/v1",
    "anthropic-messages": "",
    "google-generative-ai": "/v1beta",
}
WITHOUT_PARTIALS = """LC_ALL=C grep -a -v --line-buffered '^{"type":"message_update"'"""
"""Each piece of an answer comes with all of it so far: a long answer would be hundreds of megabytes of log."""
TAIL = 64 << 20
"""The last event holds the whole conversation: it is found within this many bytes."""


class Pi:
    """pi in print mode. ``settings.api`` picks the dialect it speaks."""

    name = "pi"
    pinned: str | None = "0.73.1"
    install_hint = "polar doctor --fix pi"

    def find(self) -> Installed | None:
        if on_path("node") is None:
            return None
        ours = harness_folder(self.name) / "node_modules" / PACKAGE / "dist" / "cli.js"
        for script in (ours, on_path("pi")):
            if script is not None and (version := _version(script)):
                return Installed(version, script, (Mount(_modules(script)), *_node_mounts()))
        return None

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint, installed: Installed) -> Plan:
        api = check_agent(agent, self.name, settings=["api"]).get("api", "openai-completions")
        if api not in BASE_PATHS:
            raise UsageError(f"agent.settings.api {api!r} is not known to pi: it has {', '.join(BASE_PATHS)}")
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
        node = str(on_path("node") or "node")
        line = [node, str(installed.executable), "-p", "--provider", PROVIDER, "--model", endpoint.model]
        run = shlex.join([*line, "--mode", "json"])
        return Plan(
            Command(
                f'{run} < "$HOME/{INSTRUCTION_FILE}" | {WITHOUT_PARTIALS}',
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


def _version(script: Path) -> str | None:
    """The version of the package that a script belongs to, if it is pi's."""
    package = script.parent.parent
    if not package.as_posix().endswith(PACKAGE.as_posix()):
        return None
    try:
        return str(json.loads((package / "package.json").read_bytes())["version"])
    except (OSError, ValueError, KeyError):
        return None


def _modules(script: Path) -> Path:
    """The outermost ``node_modules`` that a script lies in: its dependencies are there too."""
    return [folder for folder in script.parents if folder.name == "node_modules"][-1]


def _node_mounts() -> tuple[Mount, ...]:
    node = on_path("node")
    return interpreter_mounts(node) if node else ()
