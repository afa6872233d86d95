"""Bare capture sessions: a key and a record of what is called with it. No task, no sandbox, no harness of ours; the
program that calls is somebody else's, and says when it is done.

One that never says so is ended when nothing was called with it for long.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any, Literal

import msgspec

from polar.background import forever
from polar.contract.chat import Sampling
from polar.contract.result import TERMINAL_STATES, SessionResult
from polar.contract.rollout import BARE_NODE
from polar.contract.task import BuilderSpec
from polar.gateway.node import Node
from polar.gateway.provenance import provenance
from polar.gateway.session import LiveSession, new_key
from polar.gateway.session_log import about_session, log_begin, log_end
from polar.store.base import SessionRecord, StoreConflict
from polar.trajectories.assemble import assemble, record_evaluation

log = logging.getLogger("polar.sessions")

IDLE_SECONDS = 3600.0
"""How long a bare session may go without a call before it is ended."""
CUT_OFF = "cut off: Polar was ended before the session was closed"
NO_PINS = Sampling()
DEFAULT_BUILDER = BuilderSpec()


class Captures:
    """The bare sessions of a node.

    Args:
        idle_seconds: after so long without a call a session is ended.
    """

    def __init__(self, node: Node, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._node = node
        self._idle_seconds = idle_seconds
        self._open: dict[str, tuple[LiveSession, SessionRecord]] = {}

    async def open(
        self,
        *,
        session_id: str | None = None,
        task_id: str | None = None,
        sampling: Sampling = NO_PINS,
        metadata: dict[str, Any] | None = None,
    ) -> LiveSession:
        """A new session, whose key is good from now on.

        Args:
            session_id: by default a random one.
            task_id: what it belongs to; by default itself.
            sampling: pins, which win over what the program asks for.

        Raises:
            StoreConflict: there is a session of that id, or a task of that one, whose sessions are its own.
        """
        name = session_id or f"capture-{secrets.token_hex(8)}"
        if await self._node.store.session(name) is not None:
            raise StoreConflict(f"session {name} exists: take another session_id")
        if task_id is not None and await self._node.store.task(task_id) is not None:
            raise StoreConflict(f"{task_id} is a task, and its sessions are its own: take another task_id")
        now = time.time()
        record = SessionRecord(
            session_id=name,
            task_id=task_id or name,
            sample_index=0,
            state="RUNNING",
            created_at=now,
            updated_at=now,
            metadata={**(metadata or {}), BARE_NODE: self._node.node_id},
        )
        await self._node.store.put_session(record)
        session = LiveSession(
            session_id=name,
            task_id=record.task_id,
            pins=sampling,
            key=new_key(self._node.worker),
            require_token_ids=self._node.require_token_ids,
            used_at=time.monotonic(),
        )
        self._node.gateway.open(session)
        self._open[name] = session, record
        log_begin(record)
        return session

    @property
    def names(self) -> set[str]:
        """The sessions that are open here."""
        return set(self._open)

    async def close(
        self, session_id: str, *, error: str | None = None, builder: BuilderSpec = DEFAULT_BUILDER
    ) -> SessionResult | None:
        """End a session: its key takes no more calls, its traces are built, its result is stored. ``None``: it is not
        open here. Where it fails the session is still to be closed, and closing it again goes on.

        Args:
            error: why it ends as ERROR; if it is ``None`` it does so only where its calls could not be captured, or
                all of them were refused.
        """
        found = self._open.pop(session_id, None)
        if found is None:
            return None
        session, record = found
        try:
            await self._node.gateway.close(session)
            error = session.broken or error
            error = error and self._node.kept_error(error)
            if session.refusals and not await self._node.store.completions(session_id):
                why = f" ({error})" if error else ""
                error = f"{self._node.why_no_call(session, 'the program')}{why}"
            result = await self._finish(record, error, builder)
        except BaseException:
            self._open[session_id] = found
            raise
        self._node.gateway.forget(session)
        return result

    async def forget(self, session_id: str) -> int:
        """End a session if it is open here, and drop all that was captured in it: so many calls.

        Raises:
            StoreConflict: it is of a task.
        """
        await self.close(session_id)
        return await self._node.store.forget_session(session_id)

    async def close_idle(self) -> None:
        """End the sessions that nobody has used for long."""
        now = time.monotonic()
        for name, (session, record) in list(self._open.items()):
            if not session.calls and now - session.used_at > self._idle_seconds:
                with about_session(record):
                    log.warning("session %s: ended after %g s without a call", name, self._idle_seconds)
                    await self._close_or_tell(name)

    async def watch(self) -> None:
        """``close_idle`` now and then, until cancelled."""
        await forever(self.close_idle, "idle sessions can't be ended", every=min(60.0, self._idle_seconds))

    async def close_all(self) -> None:
        """End every session that is open here. One that can't be is ended at the next start."""
        for name in list(self._open):
            await self._close_or_tell(name, CUT_OFF)

    async def _close_or_tell(self, name: str, error: str | None = None) -> None:
        try:
            await self.close(name, error=error)
        except Exception:  # no reason for others to stay open
            log.exception("session %s can't be ended", name)

    async def end_those_cut_off(self) -> None:
        """Sessions of an earlier process of this node, whose keys nobody knows any more, have ended, with what was
        captured. Those of other nodes are in the same store, where several servers share one."""
        for record in await self._node.store.sessions():
            if (
                record.metadata.get(BARE_NODE) == self._node.node_id
                and record.state not in TERMINAL_STATES
                and record.session_id not in self._open
            ):
                await self._finish(record, CUT_OFF, DEFAULT_BUILDER)

    async def _finish(self, record: SessionRecord, error: str | None, builder: BuilderSpec) -> SessionResult:
        store = self._node.store
        completions = await store.completions(record.session_id)
        status: Literal["COMPLETED", "ERROR"] = "ERROR" if error else "COMPLETED"
        trajectory = await asyncio.to_thread(
            assemble,
            completions,
            builder,
            status=status,
            error=error,
            provenance=provenance(self._node, harness="capture", started_at=record.created_at),
            policy_version=record.metadata.get("policy_version"),
        )
        record_evaluation(trajectory)
        result = SessionResult(
            session_id=record.session_id,
            task_id=record.task_id,
            attempt=record.attempt,
            status=status,
            trajectory=trajectory,
            timing={"run": round(time.time() - record.created_at, 3)},
            node_id=self._node.node_id,
            error=error,
            metadata={name: value for name, value in record.metadata.items() if name != BARE_NODE},
        )
        ended = msgspec.structs.replace(record, state=status, updated_at=time.time(), error=error)
        try:
            await store.finish_session(ended, result, stored=True)
        except StoreConflict:
            # It has ended already: by an earlier try that failed after it was kept, or as one of a lost node.
            kept = await store.result(record.session_id, record.attempt)
            if kept is not None:
                return kept
            if await store.session(record.session_id) is not None:
                raise
            # It was forgotten meanwhile, and stays so.
        log_end(ended, result, ended.updated_at - record.created_at)
        return result
