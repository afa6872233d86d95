"""What an operator writes: ``polar.yaml``, checked whole. Unknown names are refused, so a typo fails at once."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from polar.contract.errors import NotAllowed, UsageError
from polar.contract.misspelt import explained
from polar.contract.task import ID_PATTERN, TaskRequest
from polar.gateway.lifecycle import Pools
from polar.redaction import RedactionConfig
from polar.rollout.auth import AuthConfig
from polar.rollout.callbacks import CallbackConfig
from polar.rollout.server import RetentionConfig

Role = Literal["all", "rollout", "gateway"]

PERMISSIONS = ("local", "internet", "host_network")
"""What ``runtimes.allow`` may name: the backend, and what a task's ``runtime`` may open."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine; several of them serve the same model together."""

    kind: Literal["local", "vllm", "sglang", "openai"] = "local"
    url: str | None = None
    model: str | None = None
    mode: Literal["tito", "chat"] | None = None
    tokenizer: str | None = None
    max_inflight: int | None = None


class RuntimesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What tasks may ask for: words of ``PERMISSIONS``. ``sandbox: none`` runs agents as plain processes of this
    user, without any wall."""

    allow: tuple[str, ...] = ("local",)
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"


class HarnessesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``allow_import``: classes that tasks may name (agents, builders, evaluators), as ``module:Class`` or
    ``package.*``."""

    allow_import: tuple[str, ...] = ()


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``body_mb`` of a model call's body; calls of one session at a time; seconds a bare session may be idle, and a
    node may take to drain."""

    body_mb: int = 256
    calls_per_session: int = 256
    idle_session_seconds: float = 3600.0
    drain_seconds: float = 30.0


class TLSConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PEM files of the certificate (with its chain) and its key."""

    cert: str
    key: str

    def context(self) -> ssl.SSLContext:
        """For a server.

        Raises:
            UsageError: the files can't be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"tls: {self.cert} and {self.key} can't be used: {error}") from None
        return context


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of ``polar serve``. ``public_url``: how others reach this machine, where that is not host and port."""

    role: Role = "all"
    host: str = "127.0.0.1"
    port: int = 8080
    public_url: str | None = None
    insecure: bool = False
    """Listen beyond loopback without TLS."""
    server: str | None = None
    """The rollout server, for the role ``gateway``."""
    node_id: str | None = None
    workers: int = 1
    """Gateway nodes on this machine, behind one port; each has the pools and the engine connections to itself."""
    store: str | None = None
    out: str = "results/serve"
    engines: tuple[EngineConfig, ...] = (EngineConfig(),)
    require_token_ids: bool = True
    buffer_replies: bool = False
    """Sample streamed replies whole, and send them in one go at the end."""
    pools: Pools = Pools(init=4, ready=4, run=8, post_run=4)
    runtimes: RuntimesConfig = RuntimesConfig()
    harnesses: HarnessesConfig = HarnessesConfig()
    limits: LimitsConfig = LimitsConfig()
    auth: AuthConfig = AuthConfig()
    tls: TLSConfig | None = None
    callbacks: CallbackConfig = CallbackConfig()
    retention: RetentionConfig = RetentionConfig()
    redaction: RedactionConfig = RedactionConfig()
    log: Literal["text", "json"] = "text"

    @property
    def name(self) -> str:
        """This node's id: the configured one, else made of the machine's name and the port."""
        if self.node_id is not None:
            return self.node_id
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip("_.-") or "node"
        return f"{host[:100]}-{self.port}"


def load_settings(path: Path | None, overrides: Mapping[str, Any]) -> ServeConfig:
    """A ``polar.yaml`` (or all defaults), with what the command line says over it: over single settings of
    ``runtimes``, and over those of the one engine that is configured.

    Raises:
        UsageError: it can't be read, or a setting is wrong; the message names it.
    """
    data: Any = {}
    where = str(path) if path is not None else "polar serve"
    if path is not None:
        try:
            data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except FileNotFoundError:
            raise UsageError(f"{path}: no such file") from None
        except (OSError, UnicodeError) as error:
            raise UsageError(f"{path} can't be read: {error}") from None
        except (yaml.YAMLError, RecursionError) as error:
            raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise UsageError(f"{path}: settings are a mapping, such as 'port: 8080'")
    try:
        config = msgspec.convert(_laid_over(data, overrides, where), ServeConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {explained(error, ServeConfig)}") from None
    problem = _problem(config)
    if problem:
        raise UsageError(f"{where}: {problem}")
    return config


def _laid_over(data: dict[str, Any], overrides: Mapping[str, Any], where: str) -> dict[str, Any]:
    laid = {**data, **overrides}
    runtimes, engines = data.get("runtimes"), data.get("engines")
    if "runtimes" in overrides and isinstance(runtimes, dict):
        laid["runtimes"] = {**runtimes, **overrides["runtimes"]}
    if "engines" in overrides and engines:
        if isinstance(engines, list) and len(engines) > 1:
            raise UsageError(
                f"{where}: {len(engines)} engines are configured, and options (--engine, --engine-url, --model, "
                "--mode, --tokenizer) say nothing of which: change them there"
            )
        (said,) = overrides["engines"]
        one = isinstance(engines, list) and isinstance(engines[0], dict)
        laid["engines"] = [{**engines[0], **said}] if one else engines  # which is refused, as what it is
    return laid


def _problem(config: ServeConfig) -> str | None:
    if not re.fullmatch(ID_PATTERN, config.name):
        return "node_id must be letters, digits, '_', '.' or '-', begin with a letter or digit, 128 at most"
    if not 0 <= config.port <= 65535:
        return "port must be from 0 to 65535"
    for name in ("init", "ready", "run", "post_run"):
        if getattr(config.pools, name) < 1:
            return f"pools.{name} must be 1 or more"
    unknown = [word for word in config.runtimes.allow if word not in PERMISSIONS]
    if unknown:
        return f"runtimes.allow: {', '.join(map(repr, unknown))} is not known: use {', '.join(PERMISSIONS)}"
    if config.role == "gateway" and not config.server:
        return "the role gateway needs server: the address of the rollout server (--server)"
    if config.server and not config.server.startswith(("http://", "https://")):
        return f"server must be http://HOST:PORT or https://HOST:PORT, and not {config.server}"
    if config.role != "gateway" and config.server:
        return "server is for the role gateway: leave it out, or say --role gateway"
    if config.port == 0 and config.node_id is None and _is_one_of_many(config):
        return "with port 0 a node needs a name of its own: set node_id (--node-id)"
    if config.workers < 1:
        return "workers must be 1 or more"
    if config.workers > 1 and config.role != "gateway":
        return "workers are gateway nodes: run the rollout server apart, and them with --role gateway --server URL"
    if config.role == "gateway" and config.store:
        return "store is the rollout server's: the role gateway keeps its journal in out"
    if not config.engines:
        return "engines is empty: name one"
    if not is_loopback(config.host) and config.tls is None and not config.insecure:
        return f"{config.host} is not loopback: set tls, or insecure if the network itself is trusted (--insecure)"
    return None


def _is_one_of_many(config: ServeConfig) -> bool:
    """Whether its node shares a ledger with others, which must be called otherwise."""
    shared = (config.store or "").startswith(("postgresql:", "postgres:"))
    return config.role == "gateway" or (config.role == "all" and shared)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_allowed(config: ServeConfig, task: TaskRequest) -> None:
    """See that a task asks for nothing that the operator has not allowed.

    Raises:
        NotAllowed: it does; the message names the setting.
    """
    allowed = config.runtimes.allow
    asked: list[str] = [task.runtime.backend]
    asked += ["internet"] if task.runtime.allow_internet else []
    asked += ["host_network"] if task.runtime.network == "host" else []
    for each in asked:
        if each not in allowed:
            raise NotAllowed(f"runtime: {each} is not allowed here: its operator can add it to runtimes.allow")
    for path in (task.agent.import_path, task.builder.strategy, task.evaluator.strategy):
        if path is not None and ":" in path and not _importable(path, config.harnesses.allow_import):
            raise NotAllowed(f"{path} may not be imported here: its operator can add it to harnesses.allow_import")


def _importable(path: str, allowed: tuple[str, ...]) -> bool:
    module = path.partition(":")[0]
    return any(
        path == entry or (entry.endswith(".*") and (module == entry[:-2] or module.startswith(entry[:-1])))
        for entry in allowed
    )
