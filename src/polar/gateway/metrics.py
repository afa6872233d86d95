"""A gateway's numbers for Prometheus, read from the gateway when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from polar.engines.pool import Pool
from polar.gateway.lifecycle import Stages
from polar.gateway.node import Node
from polar.waits import Waits


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
        refused = self._node.gateway.guesses.count
        yield CounterMetricFamily(
            "polar_unknown_keys", "Requests with a session key that is nobody's.", value=refused
        )
        tokens = CounterMetricFamily("polar_call_tokens", "Tokens of model calls.", labels=["kind"])
        for kind in ("prompt", "cached", "completion"):
            tokens.add_metric([kind], getattr(counts, f"{kind}_tokens"))
        yield tokens
        status = pipeline.inference.status()
        yield GaugeMetricFamily("polar_calls_inflight", "Calls at the engine.", value=status.inflight)
        yield GaugeMetricFamily("polar_calls_held", "Calls that wait for a pause to end.", value=status.waiting)
        yield GaugeMetricFamily("polar_paused", "Whether inference is paused.", value=float(status.paused))
        yield from self._engines()
        yield from self._waits()

    def _waits(self) -> Iterator[Metric]:
        """Time before a call was at the engine, for each thing that it may wait for."""
        engine = self._node.engine
        family = HistogramMetricFamily(
            "polar_engine_wait_seconds",
            "How long calls waited for the engine: for a pause to end, for a slot of a server (max_inflight).",
            labels=["reason", "url"],
        )
        _add(family, ["pause", ""], self._node.gateway.inference.waits)
        if isinstance(engine, Pool):
            slots = {load.url: load.slot_waits for load in engine.load()}
        else:
            slots = {engine.info.url or engine.info.kind: getattr(engine, "slot_waits", None)}
        for url, waits in slots.items():
            if waits is not None:
                _add(family, ["slot", url], waits)
        yield family

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


class StagesCollector(Collector):
    """How many sessions are in each stage of a node, how many wait for a place in it, and how long they waited."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages

    def collect(self) -> Iterator[Metric]:
        """The numbers as they are now."""
        inside = GaugeMetricFamily("polar_stage_sessions", "Sessions in a stage of this node.", labels=["stage"])
        queue = GaugeMetricFamily(
            "polar_stage_queue", "Sessions that wait for a place in a stage of this node.", labels=["stage"]
        )
        waits = HistogramMetricFamily(
            "polar_stage_wait_seconds", "How long sessions waited for a place in a stage.", labels=["stage"]
        )
        for name, places in self._stages.places.items():
            inside.add_metric([name], places.taken)
            queue.add_metric([name], places.waiting)
            _add(waits, [name], places.waits)
        yield from (inside, queue, waits)


def _add(family: HistogramMetricFamily, labels: list[str], waits: Waits) -> None:
    family.add_metric(labels, waits.buckets(), waits.seconds)
