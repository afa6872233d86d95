"""What an operator watches, for Prometheus. What is said of sessions, calls and nodes is the ledger's, and the same
at every server over it: take it from one. Writes, leases taken back and callbacks are this process's own: sum them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from polar.contract.result import SessionResult, SessionState
from polar.contract.rollout import NodeInfo
from polar.guesses import Guesses

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_MERGED = (1, 1.5, 2, 3, 5, 8, 13, 21, 34, 55, 100)


def count_guesses(registry: CollectorRegistry) -> Guesses:
    """Guesses at tokens of the control plane, which this registry shows."""
    guesses = Guesses("token")
    registry.register(_Refused(guesses))
    return guesses


class _Refused(Collector):
    """How many guesses there were."""

    def __init__(self, guesses: Guesses) -> None:
        self._guesses = guesses

    def collect(self) -> Iterator[Metric]:
        words = "Requests with a token that is nobody's, or none."
        yield CounterMetricFamily("polar_unknown_tokens", words, value=self._guesses.count)


class Metrics:
    """The numbers of one server. Others (a gateway in the same process) may register theirs in ``registry``."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.guesses = count_guesses(self.registry)
        self._states = Gauge(
            "polar_sessions", "Sessions that have not ended, by state.", ["state"], registry=self.registry
        )
        self._nodes = Gauge("polar_nodes", "Gateway nodes, by how they are.", ["condition"], registry=self.registry)
        self._ended = Counter(
            "polar_sessions_ended", "Sessions that ended, by status.", ["status"], registry=self.registry
        )
        self._stage = Histogram(
            "polar_stage_seconds",
            "How long sessions were in a stage.",
            ["stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter("polar_tokens_trained", "Tokens with loss mask 1.", registry=self.registry)
        self._fates = Counter(
            "polar_completions", "Captured calls of ended sessions, by fate.", ["fate"], registry=self.registry
        )
        self._splits = Counter("polar_splits", "Traces begun anew, by reason.", ["reason"], registry=self.registry)
        self._merge = Histogram(
            "polar_merge_factor",
            "Trained calls per trace, by session.",
            buckets=_MERGED,
            registry=self.registry,
        )
        self.leases_expired = Counter("polar_leases_expired", "Leases that were taken back.", registry=self.registry)
        self.callbacks = Counter(
            "polar_callback_tries",
            "Tries to deliver a callback, by how they went.",
            ["outcome"],
            registry=self.registry,
        )
        self.callback_age = Histogram(
            "polar_callback_age_seconds",
            "From the end of a task until its callback arrived.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._writes = Histogram(
            "polar_ledger_write_seconds",
            "Until a write to the ledger was on disk.",
            ["write"],
            buckets=_QUICK,
            registry=self.registry,
        )

    @contextmanager
    def write(self, name: str) -> Iterator[None]:
        """Time a write to the ledger."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._writes.labels(name).observe(time.perf_counter() - begin)

    def session_ended(self, result: SessionResult) -> None:
        """Count a session and what its result says."""
        self._ended.labels(result.status).inc()
        for stage, seconds in result.timing.items():
            self._stage.labels(stage).observe(seconds)
        metadata = result.trajectory.metadata
        if metadata.get("merge_factor"):
            self._merge.observe(metadata["merge_factor"])
        reconstruction = metadata.get("reconstruction") or {}
        self._tokens.inc(reconstruction.get("tokens_trained") or 0)
        for fate, names in (reconstruction.get("completions") or {}).items():
            self._fates.labels(fate).inc(len(names))
        for split in reconstruction.get("splits") or ():
            self._splits.labels(split["reason"]).inc()

    def expose(self, states: Mapping[str, int], nodes: Sequence[NodeInfo]) -> bytes:
        """Everything in Prometheus' text format, with how the ledger stands now."""
        for state in get_args(SessionState)[:-3]:
            self._states.labels(state).set(states.get(state, 0))
        self._nodes.labels("healthy").set(sum(node.healthy and not node.draining for node in nodes))
        self._nodes.labels("unhealthy").set(sum(not node.healthy for node in nodes))
        self._nodes.labels("draining").set(sum(node.draining for node in nodes))
        return generate_latest(self.registry)
