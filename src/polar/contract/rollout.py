"""What passes between trainers, the rollout server and its gateway nodes.

A session attempt is given to one node under a lease. The attempt's number is the fencing number: when a lease
lapses the session becomes a new attempt, and whatever the old holder still writes is refused. Names and shapes
of ``TaskStatus``, ``TaskResult``, ``NodeInfo`` and ``NodeLoad`` are those of NVIDIA's public Polar service, with
additions. Times are seconds, points in time epoch seconds.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polar.contract.chat import Sampling
from polar.contract.completion import Completion
from polar.contract.result import SessionResult, SessionState
from polar.contract.task import TaskRequest

HEARTBEAT_SECONDS = 2.0
"""Between two signs of life of a node."""
LARGEST_DELIVERY = 1024 * 1024 * 1024
"""Bytes of a delivery that a server takes. A conversation with many images is large."""
BARE_NODE = "capture_node"
"""In the metadata of a bare capture session's record: the node it is on, from first to last."""

TaskState = Literal["running", "completed", "cancelled"]
"""``completed``: every session has ended, in whatever way. ``cancelled``: so they have, and it was cancelled before.
A task that was cancelled is ``running`` until its nodes have ended what they held."""


class Lease(msgspec.Struct, kw_only=True):
    """One session attempt, given to one node for ``seconds`` from when it was asked for; heartbeats renew it."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int
    seconds: float
    created_at: float
    """When the session was registered."""
    task: TaskRequest


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A session attempt that a node says it holds, and where it stands."""

    session_id: str
    attempt: int
    state: SessionState


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How many sessions of a node are at or before each stage."""

    init_queue_depth: int = 0
    init_inflight: int = 0
    ready_depth: int = 0
    run_inflight: int = 0
    postrun_queue_depth: int = 0
    postrun_inflight: int = 0


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself when it registers."""

    node_id: str
    gateway_url: str
    """Where its data plane is reached from outside its machine."""
    instance: str = ""
    """Names the process: the same node under another one holds none of the leases that it had before."""
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    max_ready: int = 0
    worker_of: str = ""
    """The node that this process is a worker of, where several share a port."""
    version: str = ""
    harnesses: dict[str, str] = {}
    """Installed harnesses and their versions."""
    engines: list[dict[str, Any]] = []
    credential: str = ""
    """The name of the token under which it registered: the server's word, whatever the node says."""


class NodeInfo(msgspec.Struct, kw_only=True):
    """A node as the server knows it. ``healthy``: it was heard of within its lease time. Where it has several workers
    behind one port the numbers are those of all that are healthy, and so is ``workers`` itself."""

    node_id: str
    gateway_url: str
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    metrics: NodeLoad = NodeLoad()
    healthy: bool = True
    draining: bool = False
    heartbeat_interval_seconds: float = HEARTBEAT_SECONDS
    last_heartbeat: float = 0.0
    sessions: int = 0
    """Leases it holds."""
    worker_of: str = ""
    workers: int = 1
    version: str = ""
    harnesses: dict[str, str] = {}
    engines: list[dict[str, Any]] = []
    credential: str = ""
    """The name of the token under which it registered."""


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """A node's sign of life: what it holds and how full it is. It renews every lease that it names. ``draining``: it
    is about to end, and takes no more."""

    held: list[Held] = []
    load: NodeLoad = NodeLoad()
    draining: bool = False


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """``lost``: of what the node said it held, what it no longer holds: it must stop these and write nothing more
    under them. ``cancelled``: it must end these now, for this reason (their result is still wanted). ``drain``: take
    no more."""

    lost: list[str] = []
    cancelled: dict[str, str] = {}
    drain: bool = False


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A node asks for up to ``room`` sessions, and waits up to ``wait`` seconds for the first. Asked again under the
    same ``claim_id`` (the answer was lost), it has the leases that it got before."""

    room: int
    wait: float = 0.0
    claim_id: str | None = None


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A node hands a session attempt back, unfinished: because it drains, or because of an error of its own."""

    session_id: str
    attempt: int
    error: str | None = None


class Delivery(msgspec.Struct, kw_only=True):
    """What a node's journal hands to the server: captured calls, and at the end of an attempt its result. The same
    delivery may come again; it is a no-op then."""

    session_id: str
    attempt: int
    completions: list[Completion] = []
    result: SessionResult | None = None


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bare capture session is asked for: a key for model calls, without a harness that Polar runs. What is left out
    is chosen by the gateway; ``sampling`` pins what the caller's program asks for."""

    task_id: str | None = None
    session_id: str | None = None
    model: str | None = None
    sampling: Sampling = Sampling()
    metadata: dict[str, Any] = {}


class OpenedSession(msgspec.Struct, kw_only=True):
    """A bare capture session is open. ``base_urls``: by SDK, ``openai`` (ends in /v1), ``anthropic``, ``google``."""

    session_id: str
    api_key: str
    base_urls: dict[str, str]
    task_id: str | None = None
    created_at: float = 0.0
    completion_count: int = 0
    status: SessionState = "RUNNING"


class TaskStatus(msgspec.Struct, kw_only=True):
    """How a task stands. ``results`` has the ended sessions, whole, as summaries, or none (as asked)."""

    task_id: str
    status: TaskState
    total_sessions: int
    completed_sessions: int
    results: list[SessionResult] = []
    result_paths: list[str] = []


class TaskResult(msgspec.Struct, kw_only=True):
    """The body of a task's callback. ``delivery_id`` is the same however often it is sent."""

    task_id: str
    status: TaskState
    results: list[SessionResult] = []
    result_paths: list[str] = []
    delivery_id: str = ""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in the order of ``id``: a session entered a state, a task began or ended, a node came,
    went or drains."""

    id: int
    kind: Literal["task", "session", "node"]
    time: float
    subject: str
    """The id of the task, session or node."""
    state: str
    task_id: str | None = None
    data: dict[str, Any] = {}


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who read, exported, changed or was refused what. ``actor`` is a credential's name, never the credential."""

    time: float
    actor: str
    action: str
    subject: str
    allowed: bool = True
    detail: str = ""
