"""A gateway's numbers for Prometheus, read from the gateway when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar.engines.pool import Pool
from polar.gateway.node import Node


class NodeCollector(Collector):
    """Calls, tokens, retries, what is in flight and what waits, and each engine's load."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: the node may not have started."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """The numbers as they are now."""
        pipeline = self._node.gateway.pipeline
        counts = pipeline.counts
        calls = CounterMetricFamily(
            "polar_calls", "Model calls, by API and how they ended.", labels=["api", "outcome"]
        )
        for (api, outcome), count in list(counts.calls.items()):
            calls.add_metric([api, outcome], count)
        yield calls
        yield CounterMetricFamily("polar_calls_joined", "Retries that joined a call.", value=counts.joined)
        yield CounterMetricFamily("polar_call_seconds", "Seconds of all calls, summed.", value=counts.seconds)
        tokens = CounterMetricFamily("polar_call_tokens", "Tokens of model calls.", labels=["kind"])
        for kind in ("prompt", "cached", "completion"):
            tokens.add_metric([kind], getattr(counts, f"{kind}_tokens"))
        yield tokens
        status = pipeline.inference.status()
        yield GaugeMetricFamily("polar_calls_inflight", "Calls at the engine.", value=status.inflight)
        yield GaugeMetricFamily("polar_calls_held", "Calls that wait for a pause to end.", value=status.waiting)
        yield GaugeMetricFamily("polar_paused", "Whether inference is paused.", value=float(status.paused))
        yield from self._engines()

    def _engines(self) -> Iterator[Metric]:
        engine = self._node.engine
        families = {
            name: GaugeMetricFamily(f"polar_engine_{name}", about, labels=["url"])
            for name, about in (
                ("healthy", "Whether the engine answers."),
                ("inflight", "Calls under way at the engine."),
                ("waiting", "Of these, calls that wait for a slot (max_inflight)."),
                ("sessions", "Sessions that call the engine home."),
            )
        }
        if isinstance(engine, Pool):
            for load in engine.load():
                for name, family in families.items():
                    family.add_metric([load.url], float(getattr(load, name)))
        else:
            families["waiting"].add_metric([engine.info.url or engine.info.kind], getattr(engine, "waiting", 0))
        yield from families.values()
