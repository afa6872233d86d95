"""Sessions over HTTP: look into one, also after it has ended; and bare capture sessions, which have no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from polar.contract.completion import Completion
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.rollout import BARE_NODE, OpenedSession, OpenSession
from polar.contract.task import ID_PATTERN, BuilderSpec
from polar.results import rebuild
from polar.rollout.auth import Role
from polar.rollout.completions import CompletionView, completion_views
from polar.rollout.hosting import CaptureHost
from polar.rollout.http import Call, Handler, Query, Refused, Route, reply
from polar.rollout.views import session_summary
from polar.rollout.wire import WireTrajectory, encode, wire_result, wire_trajectory
from polar.store.base import SessionRecord
from polar.store.ledger import Ledger
from polar.trajectories import BUILDERS
from polar.trajectories.assemble import assemble


class CompletionList(msgspec.Struct):
    """The calls of a session."""

    session_id: str
    task_id: str
    completions: list[CompletionView]


class Closed(msgspec.Struct):
    """A bare session takes no more calls. ``closed``: it was open until now."""

    session_id: str
    closed: bool


class Forgotten(msgspec.Struct):
    """A bare session is not there any more, nor what it captured: so many calls."""

    session_id: str
    messages_deleted: int = 0
    deleted: bool = True


class SessionsAPI:
    """The routes of sessions.

    Args:
        capture: where bare sessions live; ``None``: there is no gateway.
        written: told that the ledger was written to.
    """

    def __init__(
        self, ledger: Ledger, capture: CaptureHost | None, written: Callable[[], None], *, allow_import: bool = False
    ) -> None:
        self._ledger = ledger
        self._capture = capture
        self._written = written
        self._allow_import = allow_import

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        one = "/sessions/{session_id}"
        listing = (
            Query("task_id", "Only of this task.", pattern=ID_PATTERN),
            Query("state", "Only in this state, such as RUNNING."),
            Query("limit", "How many, the newest first.", int, 200, least=1, most=10_000),
        )
        attempt = Query("attempt", "A number, or all; the newest by default.", pattern=r"all|[1-9]\d{0,5}")
        other = (
            Query("builder", "Another builder than the task's own."),
            Query("config", "Its config, as JSON.", default="{}"),
        )
        return [
            Route("GET", "/sessions", "session.list", "read", self.list, "Sessions in short.", query=listing),
            Route("GET", one, "session.read", "read", self.read, "A session, with its result in short."),
            Route(
                "GET", one + "/completions", "completions.read", "read", self.completions,
                "The captured calls of a session.", query=(attempt,), answer=CompletionList, audited=lambda _: True,
            ),
            Route(
                "GET", one + "/trajectory", "trajectory.read", "read", self.trajectory,
                "The traces of a session, built afresh.", query=other, answer=WireTrajectory, audited=lambda _: True,
            ),
            *capture_routes(self.open, self.close, self.forget, "submit"),
        ]  # fmt: skip

    # ---- to look at --------------------------------------------------------------------------------------

    async def list(self, call: Call) -> Response:
        query = call.query
        found = await self._ledger.recent_sessions(
            task_id=query["task_id"], state=query["state"], limit=query["limit"]
        )
        return reply({"sessions": [session_summary(record) for record in found]})

    async def read(self, call: Call) -> Response:
        record = await self._session(call.id("session_id"))
        result = await self._result(record)
        summary = session_summary(record, result)
        summary["completion_count"] = len(await self._ledger.completions(record.session_id))
        summary["result"] = None if result is None else wire_result(result, record)
        return reply(summary)

    async def completions(self, call: Call) -> Response:
        record = await self._session(call.id("session_id"))
        which = call.query["attempt"]
        if which is None:
            attempts = range(record.attempt, record.attempt + 1)
        elif which == "all":
            attempts = range(1, record.attempt + 1)
        else:
            attempts = range(int(which), int(which) + 1)
            if int(which) > record.attempt:
                raise Refused(404, f"session {record.session_id} is at attempt {record.attempt}")
        return StreamingResponse(self._completions(record, attempts), media_type="application/json")

    async def trajectory(self, call: Call) -> Response:
        record = await self._session(call.id("session_id"))
        own = await self._builder(record)
        builder = None
        if call.query["builder"] is not None:
            builder = BuilderSpec(strategy=call.query["builder"], config=_config(call.query["config"]))
            if builder.strategy not in (own.strategy, *BUILDERS):
                # Whoever may read must not be able to have any class of any module made here.
                raise Refused(422, f"builder must be {', '.join(BUILDERS)}, or the task's own")
        result = await self._result(record)
        if result is not None:
            built = (await rebuild(self._ledger, result, builder, allow_import=self._allow_import)).trajectory
        else:
            spec = builder or own
            calls = await self._ledger.completions(record.session_id, record.attempt)
            built = await asyncio.to_thread(assemble, calls, spec, allow_import=self._allow_import)
            built.metadata["state"] = record.state
        return Response(
            await asyncio.to_thread(lambda: encode(wire_trajectory(built))), media_type="application/json"
        )

    # ---- bare sessions -----------------------------------------------------------------------------------

    async def open(self, call: Call) -> Response:
        """A key, and where to use it."""
        request: OpenSession = call.body or OpenSession()
        for name in ("task_id", "session_id"):
            value = getattr(request, name)
            if value is not None:
                Query(name, "", pattern=ID_PATTERN).read(value)
        if self._capture is None:
            raise Refused(503, "there is no gateway here")
        opened = await self._capture.open(request)
        await call.done(opened.session_id)
        self._written()
        return reply(opened)

    async def close(self, call: Call) -> Response:
        record = await self._bare(call.id("session_id"))
        return reply(Closed(record.session_id, await self._close(record)))

    async def forget(self, call: Call) -> Response:
        """Here and on its gateway; one that has ended also where that is away, which is told when it is back."""
        record = await self._bare(call.id("session_id"))
        name = record.session_id
        there = 0
        try:
            if self._capture is not None:
                there = await self._capture.forget(name)
            here = await self._ledger.forget_session(name)  # of the same calls, as far as they were handed over
        except Refused:
            node = record.metadata.get(BARE_NODE)
            if record.state not in TERMINAL_STATES or node is None:
                raise
            here = await self._ledger.forget_there_later(name, node)
        self._written()
        return reply(Forgotten(name, max(there, here)))

    # ---- how ---------------------------------------------------------------------------------------------

    async def _session(self, session_id: str) -> SessionRecord:
        record = await self._ledger.session(session_id)
        if record is None:
            raise Refused(404, f"there is no session {session_id}")
        return record

    async def _bare(self, session_id: str) -> SessionRecord:
        record = await self._session(session_id)
        if await self._ledger.task(record.task_id) is not None:
            raise Refused(409, f"session {session_id} is of task {record.task_id}: cancel the task")
        return record

    async def _close(self, record: SessionRecord) -> bool:
        if self._capture is None or record.state in TERMINAL_STATES:
            return False
        closed = await self._capture.close(record.session_id)
        self._written()
        return closed

    async def _result(self, record: SessionRecord) -> SessionResult | None:
        if record.state not in TERMINAL_STATES:
            return None
        return await self._ledger.result(record.session_id, record.attempt)

    async def _builder(self, record: SessionRecord) -> BuilderSpec:
        task = await self._ledger.task(record.task_id)
        return task.builder if task is not None else BuilderSpec()

    async def _completions(self, record: SessionRecord, attempts: range) -> AsyncIterator[bytes]:
        builder = await self._builder(record)
        yield b'{"session_id":"%s","task_id":"%s","completions":[' % (
            record.session_id.encode(),
            record.task_id.encode(),
        )
        separator = b""
        for attempt in attempts:
            calls = await self._ledger.completions(record.session_id, attempt)
            views = await asyncio.to_thread(_begin, calls, builder, self._allow_import)
            while (view := await asyncio.to_thread(next, views, None)) is not None:
                yield separator + view
                separator = b","
        yield b"]}"


def capture_routes(open: Handler, close: Handler, forget: Handler, role: Role) -> list[Route]:
    """The routes that open, seal and forget a bare session; a node has the same ones, for its server."""
    return [
        Route(
            "POST", "/sessions", "session.open", role, open, "Open a bare capture session.",
            body=OpenSession, optional_body=True, answer=OpenedSession, statuses=(409,),
        ),
        Route(
            "POST", "/sessions/{session_id}/close", "session.close", role, close, "Seal a bare capture session.",
            answer=Closed, statuses=(409,), audited=lambda _: True,
        ),
        Route(
            "DELETE", "/sessions/{session_id}", "session.forget", role, forget,
            "Forget a bare capture session and all that it captured; one that is open is sealed first.",
            answer=Forgotten, statuses=(409,), audited=lambda _: True,
        ),
    ]  # fmt: skip


def _begin(calls: list[Completion], builder: BuilderSpec, allow_import: bool) -> Iterator[bytes]:
    return completion_views(calls, builder, allow_import=allow_import) if calls else iter(())


def _config(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Refused(422, f"config must be a JSON object: {error}") from None
