"""The one way a model call goes, whatever its dialect: attach, render, sample, verify, commit, answer.

The answer is given only after the completion is on disk (durable before told), and a call that ends in any
other way is kept as well, with the reason why it is not trained (nothing vanishes).
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from polar.capture.verify import judge
from polar.contract.arrays import NO_IDS, Ids, floats, ids
from polar.contract.chat import Usage
from polar.contract.completion import Completion, Outcome, WeightSpan
from polar.contract.errors import PolarError
from polar.dialects.base import Answer, Call, CallError
from polar.engines.base import EngineError
from polar.gateway.backends import Backend, Begun, Context, Ended, Piece
from polar.gateway.call import ModelCall
from polar.gateway.session import LiveSession
from polar.rendering.parsers import fold
from polar.store.base import Store, StoreConflict

log = logging.getLogger("polar.gateway")


GIVEN_UP = "The call was given up: its client went away or the session ended"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline must know of the HTTP request beside the parsed call."""

    dialect: str
    digest: bytes
    idempotency_key: str | None = None


class Recording:
    """One call while it is sampled: what will become its completion."""

    def __init__(self, session: LiveSession, call: ModelCall, parsed: Call, request: Request) -> None:
        self.session = session
        self.call = call
        self.parsed = parsed
        self.request = request
        self.seq = next(session.sequence)
        self.chat = session.pinned(session.whole(parsed))
        self.attachment = session.graph.attach(self.chat.messages)
        self.chat = msgspec.structs.replace(self.chat, messages=self.attachment.messages)
        self.prompt_ids: Ids = NO_IDS
        self.declined: str | None = None
        self.state: object = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._end: Ended | None = None

    def begin(self, event: Begun) -> None:
        """The engine has the prompt."""
        if event.ids is not None:
            self.prompt_ids = event.ids
        self.declined, self.state = event.declined, event.state
        self.call.begin(len(self.prompt_ids))

    def piece(self, event: Piece) -> None:
        """More of the reply. Some engines tell ids and logprobs apart; they pair up over the whole reply."""
        start = len(self._ids)
        self._ids.extend(event.ids)
        self._logprobs.extend(event.logprobs)
        if event.ids and event.weight_version is not None:
            self._extend_spans(event.weight_version, start)
        for delta in event.deltas:
            self.call.push(delta)

    def ended(self, event: Ended) -> None:
        """The reply is whole."""
        self._end = event
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids

    def _extend_spans(self, version: str, start: int) -> None:
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(WeightSpan(version, start, len(self._ids)))

    def completion(self, backend: Backend, outcome: Outcome | None, detail: str | None) -> Completion:
        """The record of this call; what there is of its reply, if that was cut off.

        Args:
            outcome: how it ended, where that is known; judged from the tokens otherwise.
        """
        end = self._end or Ended(fold(self.call.deltas), "abort")
        response, logprobs = ids(self._ids), floats(self._logprobs)
        if outcome is None:
            outcome, detail = judge(
                message=end.message,
                prompt_ids=self.prompt_ids,
                response_ids=response,
                logprobs=logprobs,
                finish_reason=end.finish_reason,
                usage=end.usage,
            )
        placed = self.session.graph.place(self.attachment, self.prompt_ids, self.declined)
        return Completion(
            completion_id=self.call.call_id,
            session_id=self.session.session_id,
            attempt=self.session.attempt,
            seq=self.seq,
            parent_id=placed.parent_id,
            base_id=placed.base_id,
            shared=placed.shared,
            shared_messages=placed.shared_messages,
            split=placed.split,
            created_at=self.call.created_at,
            finished_at=time.time(),
            dialect=self.request.dialect,
            mode=backend.mode,
            model_requested=self.parsed.chat.model,
            model_used=backend.info.model,
            messages=self.attachment.messages[placed.shared_messages :],
            reply=end.message,
            tools=self.chat.tools,
            sampling=self.chat.sampling,
            request_digest=self.request.digest,
            idempotency_key=self.request.idempotency_key,
            prompt_delta=self.prompt_ids[placed.shared :].copy(),
            response_ids=response,
            logprobs=logprobs,
            weight_spans=tuple(end.weight_spans) or tuple(self._spans),
            finish_reason=end.finish_reason,
            stop_sequence=end.stop_sequence,
            usage=Usage(
                len(self.prompt_ids) or (end.usage.prompt_tokens if end.usage else 0),
                len(response) or (end.usage.completion_tokens if end.usage else 0),
                end.cached_tokens,
            ),
            outcome=outcome,
            detail=detail,
            role_hint=self.parsed.role_hint,
            metadata=_metadata(self.parsed),
        )


def _metadata(parsed: Call) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if parsed.warnings:
        metadata["warnings"] = list(parsed.warnings)
    if parsed.instructions:
        metadata["instructions"] = parsed.instructions
    return metadata


class Pipeline:
    """Runs model calls against one backend and one store."""

    def __init__(self, backend: Backend, store: Store) -> None:
        self.backend = backend
        self._store = store
        self._open = asyncio.Event()
        self._open.set()

    def start(self, session: LiveSession, call: ModelCall, parsed: Call, request: Request) -> None:
        """Begin a call. It goes on by itself; follow it through ``call``."""

        def done(_: asyncio.Task[None]) -> None:
            session.calls.discard(call)
            if not call.finished:  # cancelled before its first step
                call.end(CallError("gone", GIVEN_UP))

        session.calls.add(call)
        task = asyncio.create_task(self._run(session, call, parsed, request))
        task.add_done_callback(done)
        call.run(task)

    def pause(self) -> None:
        """Hold new calls (their clients get keep-alives) until ``resume``."""
        self._open.clear()

    def resume(self) -> None:
        """Let held calls go on."""
        self._open.set()

    async def _run(self, session: LiveSession, call: ModelCall, parsed: Call, request: Request) -> None:
        try:
            await self._open.wait()
            recording = Recording(session, call, parsed, request)
            await self._record(recording)
        except CallError as error:
            call.end(error)
        except asyncio.CancelledError:
            call.end(CallError("gone", GIVEN_UP))
        except PolarError as error:
            log.error("call %s of session %s: %s", call.call_id, session.session_id, error)
            call.end(CallError("internal", str(error)))
        except Exception as error:
            log.exception("call %s of session %s failed", call.call_id, session.session_id)
            call.end(CallError("internal", f"{type(error).__name__}: {error}"))

    async def _record(self, recording: Recording) -> None:
        """Sample, then commit under whatever outcome it came to."""
        session = recording.session
        try:
            await self._sample(recording)
            await recording.call.watched()
        except asyncio.CancelledError:
            await self._commit(recording, "abandoned", "the client went away before it had its answer")
            raise
        except EngineError as error:
            outcome: Outcome = "no_token_ids" if error.kind == "no_token_ids" else "engine_error"
            await self._commit(recording, outcome, str(error))
            if error.kind == "no_token_ids":
                session.end_broken(str(error))
            raise _call_error(error) from None
        except CallError:
            raise
        except Exception as error:
            await self._commit(recording, "engine_error", f"{type(error).__name__}: {error}")
            raise
        completion = await self._commit(recording)
        if completion.outcome == "no_token_ids" and session.require_token_ids:
            why = f"{completion.detail} ({self.backend.info.url or self.backend.info.kind})"
            session.end_broken(why)
            raise CallError("unavailable", why)
        recording.call.end(_answer(completion))

    async def _sample(self, recording: Recording) -> None:
        context = Context(
            graph=recording.session.graph,
            attachment=recording.attachment,
            states=recording.session.states,
            call_id=recording.call.call_id,
            affinity=recording.session.session_id,
        )
        ended = False
        events = self.backend.run(recording.chat, context, stream=recording.parsed.stream)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Piece):
                    recording.piece(event)
                elif isinstance(event, Begun):
                    recording.begin(event)
                else:
                    recording.ended(event)
                    ended = True
        if not ended:
            raise EngineError("unavailable", "the engine ended the reply without a finish reason")

    async def _commit(
        self, recording: Recording, outcome: Outcome | None = None, detail: str | None = None
    ) -> Completion:
        """Commit. Once begun it is finished, whoever cancels the call meanwhile: what is on disk and what is
        told must be the same."""
        completion = recording.completion(self.backend, outcome, detail)
        commit = asyncio.ensure_future(self._store.put_completion(completion))
        try:
            while not commit.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(commit)
            commit.result()
        except StoreConflict as error:
            raise CallError("gone", f"The session is over: {error}") from None
        recording.session.graph.add(completion)
        recording.session.states[completion.completion_id] = recording.state
        return completion


def _answer(completion: Completion) -> Answer:
    return Answer(
        completion_id=completion.completion_id,
        created=completion.created_at,
        model=completion.model_requested,
        message=completion.reply,
        finish_reason=completion.finish_reason,
        stop_sequence=completion.stop_sequence,
        usage=completion.usage,
    )


def _call_error(error: EngineError) -> CallError:
    """What a harness is told of an engine's failure. Final errors stay final; the rest may be tried again."""
    if error.kind == "context_length":
        return CallError(
            "context_length",
            str(error),
            prompt_tokens=error.prompt_tokens,
            max_tokens=error.context_length,
        )
    if error.kind == "bad_request":
        return CallError("bad_request", str(error))
    if error.kind == "overloaded":
        return CallError("overloaded", str(error), retry_after=1.0)
    return CallError("unavailable", str(error))
