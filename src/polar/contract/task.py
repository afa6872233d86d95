"""TaskRequest: one request for n samples. Unknown fields are refused, so a typo fails at once.

Names and shapes are those of NVIDIA's public Polar service, with additions; times are seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polar.contract.chat import Sampling

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$"


class RuntimeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sandbox a session runs in. ``prepare`` runs before the agent, ``eval_prepare`` before the tests."""

    backend: Literal["local", "docker", "apptainer"] = "local"
    image: str | None = None
    prepare: tuple[str, ...] = ()
    eval_prepare: tuple[str, ...] = ()
    env: dict[str, str] = {}
    network: str | None = None
    workdir: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    allow_internet: bool = False


class CustomShell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shell command as the agent. ``{{INSTRUCTION}}`` becomes the instruction, shell-quoted. It runs in ``cwd``, by
    default the workspace."""

    command: str
    cwd: str | None = None
    env: dict[str, str] = {}


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which harness runs, and how. Exactly one of ``harness`` and ``import_path`` (a ``module:Class``)."""

    harness: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    mcp_servers: tuple[dict[str, Any], ...] = ()
    skills_path: str | None = None
    custom_shell: CustomShell | None = None


class BuilderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions become traces: ``prefix_merging``, ``per_request`` or a ``module:Class``."""

    strategy: str = "prefix_merging"
    config: dict[str, Any] = {}


class EvaluatorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a session becomes a reward: a built-in name or a ``module:Class``. What it runs, it runs in a fresh sandbox
    with a copy of the agent's workspace; with ``refresh_runtime`` ``runtime.prepare`` runs in that one as well, while
    the agent runs, so that what it makes outside of the workspace is there."""

    strategy: str = "session_completed"
    config: dict[str, Any] = {}
    env: dict[str, str] = {}
    refresh_runtime: bool = False


class TaskRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request for ``num_samples`` sessions of the same instruction."""

    task_id: str
    instruction: str
    num_samples: int = 1
    dispatch_priority: int = 0
    """0 to 100: sessions of a higher priority begin before those of a lower one. What runs is never preempted."""
    early_stop_min_usable_sessions: int | None = None
    """With so many sessions that have trained tokens and ended without an error, the rest is cancelled."""
    timeout_seconds: float = 900.0
    """The session from INIT on; waiting in a queue costs nothing."""
    agent_timeout_seconds: float | None = None
    runtime: RuntimeSpec = RuntimeSpec()
    agent: AgentSpec
    builder: BuilderSpec = BuilderSpec()
    evaluator: EvaluatorSpec = EvaluatorSpec()
    sampling: Sampling = Sampling()
    """Pins: what is set here wins over what the harness asks for."""
    callback_url: str | None = None
    metadata: dict[str, Any] = {}

    def session_id(self, sample: int) -> str:
        """The id of its n-th session."""
        return f"{self.task_id}-{sample}"
