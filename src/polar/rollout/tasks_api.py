"""Tasks over HTTP: hand one in, see how it stands, take what came of it, end it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import FileResponse, Response, StreamingResponse

from polar.config import parse_task
from polar.contract.errors import NotAllowed, UsageError
from polar.contract.task import TaskRequest
from polar.evaluators import make_evaluator
from polar.harnesses import check_agent_spec
from polar.results import stream_results
from polar.rollout.dispatch import LONGEST_WAIT, Dispatch
from polar.rollout.feed import Feed, within
from polar.rollout.http import Call, Query, Refused, Route, reply
from polar.rollout.views import ended_sessions, results_summary, session_summary, task_status, task_summary
from polar.rollout.wire import WireTaskStatus
from polar.store.base import SessionRecord
from polar.store.ledger import Ledger, TaskProgress
from polar.trajectories import make_builder
from polar.trajectories.export import export

CANCELLED_BEFORE = 300.0
"""Seconds for which a task that was cancelled before it came is refused."""
CANCEL_WAIT = 5.0
"""Seconds that a cancellation waits for the sessions' ends: nodes hear of it at their next heartbeat."""
MOST_SAMPLES = 10_000


class Submitted(msgspec.Struct):
    """A task is in the ledger. The answer is the same however often it is handed in."""

    task_id: str
    status: Literal["running"] = "running"


class TasksAPI:
    """The routes of tasks.

    Args:
        check: refuses a task that can't or may not be run here, with a UsageError.
        allow_import: tasks may name builders of their own.
    """

    def __init__(
        self,
        ledger: Ledger,
        dispatch: Dispatch,
        feed: Feed,
        check: Callable[[TaskRequest], None],
        *,
        allow_import: bool = False,
    ) -> None:
        self._ledger = ledger
        self._dispatch = dispatch
        self._feed = feed
        self._check = check
        self._allow_import = allow_import
        self._refused_until: dict[str, float] = {}

    def routes(self) -> list[Route]:
        """Their lines in the table."""
        results = Query("results", "What of the ended sessions.", default="full", choices=("none", "summary", "full"))
        wait = Query("wait", "Seconds to wait for the end.", float, 0.0, most=LONGEST_WAIT)
        if_missing = Query("register_if_missing", "Refuse the task if it comes later.", bool, False)
        listing = (
            Query("status", "Only these.", choices=("running", "completed", "cancelled")),
            Query("harness", "Only of this harness."),
            Query("since", "Only what has changed since (epoch seconds).", float),
            Query("limit", "How many, the newest first.", int, 200, least=1, most=1000),
        )
        one = "/rollout/task/{task_id}"
        return [
            Route(
                "POST", "/rollout/task/submit", "task.submit", "submit", self.submit,
                "Hand in a task.", body=TaskRequest, unchecked=True, answer=Submitted, statuses=(409,),
            ),
            Route(
                "GET", one, "task.read", "read", self.status, "How a task stands.",
                query=(results, wait), answer=WireTaskStatus, audited=_with_traces,
            ),
            Route(
                "DELETE", one, "task.cancel", "submit", self.cancel, "End a task, and wait some seconds for it.",
                query=(if_missing,), answer=WireTaskStatus, audited=_always,
            ),
            Route(
                "GET", one + "/traces.parquet", "traces.export_parquet", "read", self.parquet,
                "The finished traces so far, as Parquet.", answer="application/vnd.apache.parquet", audited=_always,
            ),
            Route(
                "GET", one + "/traces.jsonl", "traces.export_jsonl", "read", self.jsonl,
                "The finished traces so far, a JSON object a line.", answer="application/jsonl", audited=_always,
            ),
            Route("GET", "/tasks", "task.list", "read", self.list, "The tasks in short.", query=listing),
            Route(
                "GET", "/tasks/{task_id}/sessions", "task.sessions", "read", self.sessions,
                "The sessions of a task in short.",
            ),
        ]  # fmt: skip

    async def submit(self, call: Call) -> Response:
        """The same body again is the same task."""
        task = parse_task(call.body)
        self._check(task)
        if self._refused_until.get(task.task_id, 0.0) > time.monotonic():
            raise Refused(409, f"task {task.task_id} was cancelled before it came: choose another task_id")
        await call.done(task.task_id)
        await self._dispatch.submit(task)
        return reply(Submitted(task.task_id))

    async def status(self, call: Call) -> Response:
        task_id = call.id("task_id")
        progress = await self._progress(task_id)
        if progress.status == "running" and call.query["wait"]:
            progress = await call.while_connected(self._until_ended(task_id, call.query["wait"]))
        return await self._answer(progress, call.query["results"])

    async def cancel(self, call: Call) -> Response:
        task_id = call.id("task_id")
        if not await self._dispatch.cancel(task_id):
            if not call.query["register_if_missing"]:
                raise _unknown(task_id)
            now = time.monotonic()
            self._refused_until = {name: end for name, end in self._refused_until.items() if end > now}
            self._refused_until[task_id] = now + CANCELLED_BEFORE
            return reply(WireTaskStatus(task_id=task_id, status="cancelled", total_sessions=0, completed_sessions=0))
        progress = await call.while_connected(self._until_ended(task_id, CANCEL_WAIT))
        return await self._answer(progress, "summary")

    async def list(self, call: Call) -> Response:
        query = call.query
        states = {progress.task_id: progress.status for progress in await self._ledger.progress()}
        sessions: dict[str, list[SessionRecord]] = defaultdict(list)
        for record in await self._ledger.sessions():
            sessions[record.task_id].append(record)
        found = [
            task_summary(task, states.get(task.task_id, "running"), sessions[task.task_id])
            for task in await self._ledger.tasks()
        ]
        found = [
            each
            for each in found
            if query["status"] in (None, each["status"])
            and query["harness"] in (None, each["harness"])
            and (query["since"] is None or each["updated_at"] >= query["since"])
        ]
        found.sort(key=lambda each: each["updated_at"], reverse=True)
        page = found[: query["limit"]]
        for each in page:
            ended = await ended_sessions(self._ledger, each["task_id"])
            each |= results_summary([one.result for one in ended])
        return reply({"tasks": page})

    async def sessions(self, call: Call) -> Response:
        task_id = call.id("task_id")
        await self._progress(task_id)
        results = {one.record.session_id: one.result for one in await ended_sessions(self._ledger, task_id)}
        records = await self._ledger.sessions(task_id)
        return reply(
            {
                "task_id": task_id,
                "sessions": [session_summary(each, results.get(each.session_id)) for each in records],
            }
        )

    async def parquet(self, call: Call) -> Response:
        return await self._export(call.id("task_id"), "parquet", "application/vnd.apache.parquet")

    async def jsonl(self, call: Call) -> Response:
        return await self._export(call.id("task_id"), "jsonl", "application/jsonl")

    # ---- how ---------------------------------------------------------------------------------------------

    async def _progress(self, task_id: str) -> TaskProgress:
        found = await self._ledger.progress(task_id)
        if not found:
            raise _unknown(task_id)
        return found[0]

    async def _until_ended(self, task_id: str, seconds: float) -> TaskProgress:
        until = time.monotonic() + seconds
        signal = self._feed.ended(task_id)
        while True:
            ended = signal.next()
            progress = await self._progress(task_id)
            left = until - time.monotonic()
            if progress.status != "running" or left <= 0 or self._feed.closed:
                return progress
            await within(ended, left)

    async def _answer(self, progress: TaskProgress, results: Literal["none", "summary", "full"]) -> Response:
        pieces = task_status(self._ledger, progress, results, allow_import=self._allow_import)
        return StreamingResponse(pieces, media_type="application/json")

    async def _export(self, task_id: str, to: Literal["parquet", "jsonl"], media: str) -> Response:
        """By way of a file: Parquet has its index at the end, and an error must come before the first byte."""
        await self._progress(task_id)
        ended = [one.result for one in await ended_sessions(self._ledger, task_id)]
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="polar-export-"))
        path = folder / f"traces.{to}"
        try:
            await stream_results(
                self._ledger, ended, lambda results: export(results, path, to), allow_import=self._allow_import
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        done = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
        return FileResponse(path, media_type=media, filename=f"{task_id}.{to}", background=done)


def _unknown(task_id: str) -> Refused:
    return Refused(404, f"there is no task {task_id}")


def _always(_: Mapping[str, Any]) -> bool:
    return True


def _with_traces(query: Mapping[str, Any]) -> bool:
    return bool(query["results"] == "full")


def check_task(task: TaskRequest, *, allow_import: bool = False) -> None:
    """See that what a task names is known, without needing it to be installed here.

    Raises:
        UsageError: it is not, or a class of the task's own is not allowed, or it asks for too many sessions.
    """
    if task.num_samples > MOST_SAMPLES:
        raise UsageError(f"task: num_samples must be {MOST_SAMPLES} or less: hand in several tasks")
    own = [task.builder.strategy, task.evaluator.strategy, task.agent.import_path or ""]
    if not allow_import and any(":" in name for name in own):
        raise NotAllowed("task: a class of its own (module:Class) is not allowed on this server")
    if ":" not in task.builder.strategy:
        make_builder(task.builder)
    if ":" not in task.evaluator.strategy:
        make_evaluator(task.evaluator)
    check_agent_spec(task.agent)
