"""The one way a model call goes, whatever its dialect: attach, render, sample, verify, commit, answer.

The answer is given only after the completion is on disk (durable before told), and a call that ends in any
other way is kept as well, with the reason why it is not trained (nothing vanishes).
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec

from polar.capture.distribution import distribution
from polar.capture.verify import judge
from polar.contract.arrays import NO_IDS, Ids, floats, ids
from polar.contract.chat import Chat, Usage
from polar.contract.completion import Completion, Outcome
from polar.contract.errors import PolarError
from polar.dialects.base import Answer, Call, CallError, Tokens
from polar.engines.base import EngineError
from polar.gateway.backends import Backend, Begun, Context, Ended, Piece
from polar.gateway.call import ModelCall
from polar.gateway.counts import CallCounts
from polar.gateway.images import heed_images
from polar.gateway.inference import Admission, InferenceControl
from polar.gateway.plain_prompts import PlainPrompt, place_plain, plain_ids
from polar.gateway.session import LiveSession
from polar.gateway.weights import WeightRecord
from polar.redaction import Redaction
from polar.rendering.parsers import fold
from polar.store.base import Store, StoreConflict, StoreFailure

log = logging.getLogger("polar.gateway")


GIVEN_UP = "The call was given up: its client went away or the session ended"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the pipeline must know of the HTTP request beside the parsed call."""

    dialect: str
    digest: bytes
    idempotency_key: str | None = None


class Recording:
    """One call while it is sampled: what will become its completion."""

    def __init__(
        self,
        session: LiveSession,
        call: ModelCall,
        parsed: Call,
        chat: Chat,
        request: Request,
        inference: InferenceControl,
        plain: PlainPrompt | None = None,
    ) -> None:
        self.session = session
        self.call = call
        self.parsed = parsed
        self.request = request
        self.seq = next(session.sequence)
        self.chat = session.pinned(chat)
        self.plain = plain
        self.attachment = plain.attachment if plain else session.graph.attach(self.chat.messages)
        self.chat = msgspec.structs.replace(self.chat, messages=self.attachment.messages)
        self.prompt_ids: Ids = NO_IDS
        self.declined: str | None = None
        self.state: object = None
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._inference = inference
        self._weights = WeightRecord(inference.version)
        self._warnings = parsed.warnings
        self._constrained = False
        self._end: Ended | None = None

    def begin(self, event: Begun) -> None:
        """The engine has the prompt."""
        if event.ids is not None:
            self.prompt_ids = event.ids
        self.declined, self.state = event.declined, event.state
        self._constrained = event.constrained
        self._warn(event.warnings)
        self.call.begin(len(self.prompt_ids))

    def piece(self, event: Piece) -> None:
        """More of the reply. Some engines tell ids and logprobs apart; they pair up over the whole reply."""
        start = len(self._ids)
        self._ids.extend(event.ids)
        self._logprobs.extend(event.logprobs)
        version = self._inference.version
        self._weights.piece(start, len(self._ids), reported=event.weight_version, told=version)
        self._weights.spans(event.weight_spans)
        for delta in event.deltas:
            self.call.push(delta)

    def ended(self, event: Ended) -> None:
        """The reply is whole."""
        self._end = event
        self._warn(event.warnings)
        if event.prompt_ids is not None:
            self.prompt_ids = event.prompt_ids

    def _warn(self, lines: tuple[str, ...]) -> None:
        self._warnings += lines
        for line in lines:
            self.session.warn(line)

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
                limit=end.limit,
                doubt=end.doubt,
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
            weight_spans=self._weights.whole(),
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
            metadata=self._metadata(backend, end),
        )

    def _metadata(self, backend: Backend, end: Ended) -> dict[str, Any]:
        """What a reader of this call should know beside its tokens; nothing where there is nothing to say."""
        of, misleading = distribution(
            backend.info.logprobs,
            self.chat.sampling,
            constrained=self._constrained or (backend.mode == "chat" and _constrained(self.chat)),
            engine_defaults=backend.mode == "chat",
        )
        if misleading is not None:
            self.session.warn(misleading)
        found = {
            "plain": self.plain is not None,
            "warnings": list(self._warnings),
            "instructions": self.parsed.instructions,
            "logprobs": of,
            "logprobs_warning": misleading,
            "continued": end.stops,
            **self._weight_notes(),
        }
        return {name: value for name, value in found.items() if value}

    def _weight_notes(self) -> dict[str, Any]:
        """Where what the operator set and what the engine reports differ, and where neither can tell."""
        names = self._weights.disagreement()
        if names is not None:
            line = self._inference.disagreement(*names)
            return {"weight_version_warning": line, "weight_spans_set": msgspec.to_builtins(self._weights.told)}
        return {} if self._weights.from_engine else {"weight_version_uncertain": self._weights.uncertain}


def _constrained(chat: Chat) -> bool:
    """Whether the engine lets a grammar decide which tokens are allowed."""
    form = (chat.response_format or {}).get("type")
    return form not in (None, "text") or (bool(chat.tools) and chat.tool_choice not in (None, "auto", "none"))


class Pipeline:
    """Runs model calls against one backend and one store. ``inference`` is the gate before the backend.

    Args:
        redaction: takes text out of what is stored; harness and context graph have the whole.
    """

    def __init__(self, backend: Backend, store: Store, redaction: Redaction | None = None) -> None:
        self.backend = backend
        self.inference = InferenceControl()
        self.counts = CallCounts()
        self._store = store
        self._redaction = redaction

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

    async def count(self, session: LiveSession, parsed: Call) -> int:
        """The prompt length of a call, without generating; nothing is recorded.

        Raises:
            CallError: it can't be told.
        """
        try:
            _, chat = self._readable(session, parsed)
            return await self.backend.count(chat)
        except EngineError as error:
            raise _call_error(error) from None

    async def _run(self, session: LiveSession, call: ModelCall, parsed: Call, request: Request) -> None:
        ids = {**session.ids, "call_id": call.call_id}
        try:
            async with self.inference.admitted() as admission:
                plain = await self._plain(session, parsed)
                parsed, chat = self._readable(session, parsed)
                recording = Recording(session, call, parsed, chat, request, self.inference, plain)
                await self._record(recording, admission)
        except CallError as error:
            call.end(error)
        except asyncio.CancelledError:
            call.end(CallError("gone", GIVEN_UP))
        except PolarError as error:
            log.error("call %s of session %s: %s", call.call_id, session.session_id, error, extra=ids)
            call.end(CallError("internal", str(error)))
        except Exception as error:
            log.exception("call %s of session %s failed", call.call_id, session.session_id, extra=ids)
            call.end(CallError("internal", f"{type(error).__name__}: {error}"))

    def _readable(self, session: LiveSession, parsed: Call) -> tuple[Call, Chat]:
        """The call, and its whole conversation as this engine can be given it: what is recorded is what it read.

        Raises:
            CallError: it can't be given that.
        """
        chat = session.whole(parsed)
        if self.backend.mode == "chat":
            return parsed, chat
        chat, left_out = heed_images(chat)
        return replace(parsed, warnings=(*parsed.warnings, *left_out)), chat

    async def _plain(self, session: LiveSession, parsed: Call) -> PlainPrompt | None:
        """The prompt of a call that is no conversation, in its place."""
        chat, plain = parsed.chat, self.backend.plain
        if chat.prompt is None:
            return None
        prompt = await plain_ids(chat, plain)
        assert plain is not None
        return place_plain(chat, prompt, session.graph, session.states, session.plain, plain)

    async def _record(self, recording: Recording, admission: Admission) -> None:
        """Sample, then commit under whatever outcome it came to."""
        session = recording.session
        try:
            await self._sample(recording, admission)
            await recording.call.watched()
            recording.call.committing = True
        except asyncio.CancelledError:
            await self._commit(recording, "abandoned", "the client went away before it had its answer")
            raise
        except EngineError as error:
            outcome: Outcome = "no_token_ids" if error.kind == "no_token_ids" else "engine_error"
            await self._commit(recording, outcome, str(error))
            if error.kind == "no_token_ids" and session.require_token_ids:
                session.end_broken(str(error))
            raise _call_error(error) from None
        except CallError:
            raise
        except Exception as error:
            await self._commit(recording, "engine_error", f"{type(error).__name__}: {error}")
            raise
        completion = await self._commit(recording)
        if completion.outcome == "aborted":
            raise CallError("overloaded", "The engine stopped the reply before it was whole", retry_after=1)
        if completion.outcome == "no_token_ids" and session.require_token_ids:
            why = f"{completion.detail} ({self.backend.info.url or self.backend.info.kind})"
            session.end_broken(why)
            raise CallError("unavailable", why)
        recording.call.end(self._answer(session, completion))

    def _answer(self, session: LiveSession, completion: Completion) -> Answer:
        plain = self.backend.plain
        return Answer(
            completion_id=completion.completion_id,
            created=completion.created_at,
            model=completion.model_requested,
            message=completion.reply,
            finish_reason=completion.finish_reason,
            stop_sequence=completion.stop_sequence,
            usage=completion.usage,
            tokens=Tokens(
                ids=completion.response_ids,
                logprobs=completion.logprobs,
                prompt_ids=lambda: session.graph.prompt_ids(completion),
                text=(lambda token: plain.decode([token])) if plain is not None else None,
            ),
        )

    async def _sample(self, recording: Recording, admission: Admission) -> None:
        context = Context(
            attachment=recording.attachment,
            states=recording.session.states,
            call_id=recording.call.call_id,
            affinity=recording.session.session_id,
            admission=admission,
            plain=recording.plain,
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
        commit = asyncio.ensure_future(self._store.put_completion(self._redacted(recording.session, completion)))
        try:
            while not commit.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(commit)
            commit.result()
        except StoreConflict as error:
            raise CallError("gone", f"The session is over: {error}") from None
        except StoreFailure as error:
            recording.session.unkept = str(error)
            raise
        recording.session.graph.add(completion)
        recording.session.states[completion.completion_id] = recording.state
        self.counts.ended(completion)
        return completion

    def _redacted(self, session: LiveSession, completion: Completion) -> Completion:
        """The call as it may be stored."""
        if self._redaction is None:
            return completion
        if session.redaction is None:
            session.redaction = self._redaction.session()
        return session.redaction.apply(completion)


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
        return CallError("overloaded", str(error), retry_after=1)
    return CallError("unavailable", str(error))
