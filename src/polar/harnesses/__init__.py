"""Harnesses: agent programs as they are. One file each, and one line here."""

from __future__ import annotations

from polar.contract.errors import UsageError
from polar.contract.task import AgentSpec
from polar.harnesses import custom
from polar.harnesses.base import BuiltIn, Endpoint, Harness, Installed, Plan
from polar.harnesses.claude_code import ClaudeCode
from polar.harnesses.codex import Codex
from polar.harnesses.gemini_cli import GeminiCLI
from polar.harnesses.mini_swe_agent import MiniSweAgent
from polar.harnesses.opencode import OpenCode
from polar.harnesses.openhands_sdk import OpenHandsSDK
from polar.harnesses.pi import Pi
from polar.harnesses.plans import standard_env
from polar.harnesses.qwen_code import QwenCode
from polar.harnesses.shell import Shell

__all__ = [
    "Endpoint",
    "Harness",
    "Installed",
    "Plan",
    "by_name",
    "check_agent_spec",
    "make_harness",
    "names",
    "standard_env",
]

HARNESSES: dict[str, type[BuiltIn]] = {
    "shell": Shell,
    "codex": Codex,
    "claude_code": ClaudeCode,
    "gemini_cli": GeminiCLI,
    "qwen_code": QwenCode,
    "opencode": OpenCode,
    "pi": Pi,
    "mini_swe_agent": MiniSweAgent,
    "openhands_sdk": OpenHandsSDK,
}


TWO = "agent has both harness and import_path: leave one out"


def names() -> tuple[str, ...]:
    """Every harness that comes with Polar."""
    return tuple(HARNESSES)


def by_name(name: str) -> BuiltIn:
    """A harness that comes with Polar.

    Raises:
        UsageError: there is none of that name; the message lists them.
    """
    try:
        return HARNESSES[name.replace("-", "_")]()
    except KeyError:
        raise UsageError(f"harness {name!r} is not known: there are {', '.join(HARNESSES)}") from None


def make_harness(agent: AgentSpec, *, allow_import: bool = False) -> Harness:
    """The harness of an agent spec: by name, by import path, or ``shell`` for a bare ``custom_shell``.

    Raises:
        UsageError: none or two are named, or the one named is not known or not allowed.
    """
    if agent.harness is not None and agent.import_path is not None:
        raise UsageError(TWO)
    if agent.import_path is not None:
        return custom.load(agent.import_path, allow_import=allow_import)
    return _built_in(agent)


def check_agent_spec(agent: AgentSpec) -> None:
    """See that an agent spec fits its harness, without needing it to be installed here. Of one that is a class of the
    task's own nothing is known.

    Raises:
        UsageError: it does not fit, or there is no such harness.
    """
    if agent.import_path is None:
        _built_in(agent).check(agent)
    elif agent.harness is not None:
        raise UsageError(TWO)


def _built_in(agent: AgentSpec) -> BuiltIn:
    if agent.harness is not None:
        return by_name(agent.harness)
    if agent.custom_shell is not None:
        return Shell()
    raise UsageError(f"agent names no harness: there are {', '.join(HARNESSES)}")
