"""Sessions as OpenTelemetry traces: the stages and calls of an attempt under its one root."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from polar import background
from polar.contract.completion import Completion
from polar.contract.rollout import Event
from polar.rollout.tracing import SessionTraces, session_traces
from tests.rollout.conftest import MakeWorld
from tests.rollout.making import task


async def test_an_attempt_is_a_trace_of_its_stages_and_calls(make_world: MakeWorld) -> None:
    exported = InMemorySpanExporter()
    traces = SessionTraces(exported)
    world = await make_world(traces=traces)
    await world.join()
    await world.submit(task())
    (lease,) = await world.claim()
    held = {"session_id": lease["session_id"], "attempt": lease["attempt"], "state": "RUNNING"}
    await world.node("/nodes/n1/heartbeat", {"held": [held]})
    await world.finish(lease, status="ERROR", error="it broke")
    async with asyncio.timeout(20):
        while not any(span.name == "session" for span in exported.get_finished_spans()):
            await asyncio.to_thread(traces._provider.force_flush)
    spans = {span.name: span for span in exported.get_finished_spans()}
    root = spans["session"]
    assert root.context is not None
    assert root.parent is None
    assert (root.status.is_ok, root.status.description) == (False, "it broke")
    children = [span for span in exported.get_finished_spans() if span is not root]
    assert {span.context.trace_id for span in children if span.context} == {root.context.trace_id}
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}
    assert [span.name for span in children].count("model call") == 2
    assert spans["running"].attributes is not None
    assert spans["running"].attributes["polar.session_id"] == "t1-0"
    call = spans["model call"]
    assert (call.start_time, call.end_time) == (101 * 10**9, int(101.5 * 10**9))


def test_without_a_receiver_there_are_no_traces() -> None:
    assert session_traces({}) is None
    made = session_traces({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert made is not None
    made.close()


async def test_an_event_that_no_span_can_be_made_of_holds_up_no_other(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "AFTER_FAILURE", 0.01)
    exported = InMemorySpanExporter()
    traces = SessionTraces(exported)
    take = traces._take

    def broken(event: Event, calls: Sequence[Completion]) -> None:
        if event.subject == "bad-0":
            raise KeyError("no such field")
        take(event, calls)

    monkeypatch.setattr(traces, "_take", broken)
    world = await make_world(traces=traces)
    await world.join()
    await world.run(task("bad"))
    await world.run(task("good"))
    async with asyncio.timeout(20):
        while not any(span.name == "session" for span in exported.get_finished_spans()):
            await asyncio.to_thread(traces._provider.force_flush)
    names = {(span.attributes or {}).get("polar.session_id") for span in exported.get_finished_spans()}
    assert names == {"good-0"}
