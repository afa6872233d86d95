"""Sessions as OpenTelemetry traces: one trace an attempt, a span for each stage and each model call.

Spans are made from what the ledger tells, with the times at which things happened there, so nothing on a call's way
knows of them and nothing waits for them. Ids follow from what a span is of: two servers over one ledger tell the same
span twice, not two spans. On when OpenTelemetry's own variables name a receiver (``OTEL_EXPORTER_OTLP_ENDPOINT``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from polar.background import forever
from polar.contract.completion import Completion
from polar.contract.errors import MissingExtra
from polar.contract.result import TERMINAL_STATES
from polar.contract.rollout import Event
from polar.rollout.feed import Feed, within
from polar.store.ledger import Ledger

try:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        Status,
        StatusCode,
        TraceFlags,
        set_span_in_context,
    )
except ImportError:  # an optional part
    IdGenerator = object  # type: ignore[assignment,misc]

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
LOOK_EVERY = 5.0
_PAGE = 500
_FOLLOWED = 100_000
"""Sessions of which the last state is kept in memory."""


class _NamedIds(IdGenerator):
    """Gives the ids that were named for the next span."""

    trace_id = span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class SessionTraces:
    """Makes spans of what has happened.

    Args:
        exporter: where they go.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._ids = _NamedIds()
        resource = Resource.create({"service.name": "polar"})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("polar")
        self._last: dict[str, Event] = {}
        self._began: dict[str, float] = {}

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    async def follow(self, ledger: Ledger, feed: Feed, cursor: int) -> None:
        """Make spans of every event after ``cursor``, until cancelled."""

        async def step() -> None:
            nonlocal cursor
            more = feed.any.next()
            while events := await ledger.events_after(cursor, _PAGE):
                for event in (each for each in events if each.kind == "session"):
                    calls: Sequence[Completion] = ()
                    if event.state in TERMINAL_STATES:
                        calls = await ledger.completions(event.subject, event.data.get("attempt", 1))
                    cursor = event.id  # what no span can be made of is left out
                    self._take(event, calls)
                cursor = events[-1].id
            await within(more, LOOK_EVERY)

        await forever(step, "events can't be traced")

    def _take(self, event: Event, calls: Sequence[Completion]) -> None:
        name = event.subject
        before = self._last.pop(name, None)
        if before is not None and before.data.get("attempt") == event.data.get("attempt"):
            self._span(before, before.state.lower(), before.time, event.time, {})
        else:
            self._began[name] = event.time
        if event.state not in TERMINAL_STATES:
            self._last[name] = event
            while len(self._last) > _FOLLOWED:
                lost = next(iter(self._last))
                del self._last[lost]
                self._began.pop(lost, None)
            return
        for call in calls:
            self._span(event, "model call", call.created_at, call.finished_at, _facts(call), call.completion_id)
        self._session(event, self._began.pop(name, event.time))

    def _session(self, event: Event, began: float) -> None:
        self._ids.trace_id, self._ids.span_id = _trace_id(event), _span_id(event, "session")
        span = self._tracer.start_span("session", start_time=_nanoseconds(began), attributes=_of(event))
        if event.state != "COMPLETED":
            span.set_status(Status(StatusCode.ERROR, event.data.get("error") or event.state))
        span.end(_nanoseconds(event.time))

    def _span(
        self, event: Event, name: str, begin: float, end: float, facts: Mapping[str, Any], key: str | None = None
    ) -> None:
        session = SpanContext(
            _trace_id(event), _span_id(event, "session"), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )
        self._ids.span_id = _span_id(event, key or name)
        span = self._tracer.start_span(
            name,
            set_span_in_context(NonRecordingSpan(session)),
            start_time=_nanoseconds(begin),
            attributes={**_of(event), **facts},
        )
        span.end(_nanoseconds(end))


def session_traces(environ: Mapping[str, str]) -> SessionTraces | None:
    """The traces that OpenTelemetry's variables ask for; ``None``: they ask for none.

    Raises:
        MissingExtra: they do, and OpenTelemetry is not installed.
    """
    if not any(environ.get(name) for name in ENDPOINTS):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise MissingExtra(f"Sending traces to {' or '.join(ENDPOINTS)}", "otel") from None
    return SessionTraces(OTLPSpanExporter())


def _of(event: Event) -> dict[str, Any]:
    return {
        "polar.session_id": event.subject,
        "polar.task_id": event.task_id or "",
        "polar.attempt": event.data.get("attempt", 1),
    }


def _facts(call: Completion) -> dict[str, Any]:
    return {
        "polar.completion_id": call.completion_id,
        "polar.outcome": call.outcome,
        "polar.dialect": call.dialect,
        "gen_ai.request.model": call.model_requested,
        "gen_ai.response.model": call.model_used,
        "gen_ai.usage.input_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": call.usage.completion_tokens,
    }


def _trace_id(event: Event) -> int:
    return _number(f"{event.subject} {event.data.get('attempt', 1)}", 16)


def _span_id(event: Event, key: str) -> int:
    return _number(f"{event.subject} {event.data.get('attempt', 1)} {key}", 8)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
