"""Why: one server is seldom enough, and one that dies must not take the sessions with it. A pool is several servers
of one model that look like one engine.

A session stays with its server, whose prefix cache knows it; a new one goes where the least is under way. A server
that can't be reached is left out until it answers again. A call moves on to another server (from one that hangs, too)
only as long as nothing of its reply has been seen. There is no queue here: a server's own ``max_inflight`` is the
only one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat, FinishReason, Message, Sampling
from polar.contract.errors import UsageError
from polar.engines.base import (
    ChatChunk,
    ChatEngine,
    Checkable,
    CountingEngine,
    Engine,
    EngineError,
    EngineInfo,
    RenderingEngine,
    TokenChunk,
    TokenEngine,
    close_now,
)
from polar.waits import Waits

log = logging.getLogger("polar.engines")

PROBE_SECONDS = 5.0
"""Between two looks at a server."""
IDLE_SECONDS = 3600.0
"""After so long without a call a session's server is forgotten: it may go anywhere then."""
MOST_TRIES = 3
"""Servers that one call is tried on: one that kills servers must not kill them all."""


class MemberLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a pool. ``inflight`` calls are under way there, of which ``waiting`` wait for a slot;
    ``sessions`` call it home."""

    url: str
    healthy: bool
    inflight: int
    waiting: int
    sessions: int
    slot_waits: Waits | None = None
    """How long calls waited for a slot, where the engine says so."""


E = TypeVar("E", bound=Engine)


@dataclass(eq=False)
class _Member(Generic[E]):
    engine: E
    healthy: bool = True
    inflight: int = 0
    sessions: int = 0
    watch: asyncio.Task[None] | None = None
    """Looks at the server again and again. One each: a server that hangs is no news of the others."""

    @property
    def name(self) -> str:
        return self.engine.info.url or self.engine.info.model

    def load(self) -> MemberLoad:
        waiting: int = getattr(self.engine, "waiting", 0)
        return MemberLoad(
            url=self.name,
            healthy=self.healthy,
            inflight=self.inflight,
            waiting=waiting,
            sessions=self.sessions,
            slot_waits=getattr(self.engine, "slot_waits", None),
        )

    async def close(self) -> None:
        """No more looks, and no more calls."""
        if self.watch is not None:
            self.watch.cancel()
            await asyncio.gather(self.watch, return_exceptions=True)
        await self.engine.close()


@dataclass(slots=True)
class _Home(Generic[E]):
    """Where a session's calls go, and when the last one went there (event loop time)."""

    member: _Member[E]
    used: float = 0.0


class _Chunk(Protocol):
    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...


C = TypeVar("C", bound=_Chunk)


class Pool(Generic[E]):
    """What all pools do. Make one with ``pool_of``.

    Args:
        probe_seconds: between two looks at a server.
        idle_seconds: after so long without a call a session's server is forgotten.
    """

    def __init__(
        self, engines: Sequence[E], *, probe_seconds: float = PROBE_SECONDS, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self.changed = asyncio.Condition()
        """Notified whenever a server goes out or comes back, joins or is let go."""
        self._members: list[_Member[E]] = []
        self.hold(engines)
        self._homes: OrderedDict[str, _Home[E]] = OrderedDict()
        self._probe_seconds = probe_seconds
        self._idle_seconds = idle_seconds
        self._info: EngineInfo | None = None

    def hold(self, engines: Sequence[E]) -> None:
        """Be these engines, which have not been started, from the start on."""
        self._members = [_Member(engine) for engine in engines]

    @property
    def info(self) -> EngineInfo:
        """What all of them serve, with the shortest context among them."""
        if self._info is None:
            raise RuntimeError("the engines have not been started")
        return self._info

    def load(self) -> list[MemberLoad]:
        """How full each server is now."""
        return [member.load() for member in self._members]

    async def start(self) -> None:
        """Start all of them, and see that they are of one kind.

        Raises:
            UsageError: one of them can't be started, or is no server of the same model as the first.
        """
        try:
            starts = (member.engine.start() for member in self._members)
            failures = [failed for failed in await asyncio.gather(*starts, return_exceptions=True) if failed]
            if failures:
                raise failures[0]
            self._info = _common([member.engine.info for member in self._members])
        except BaseException:
            await self.close()
            raise
        for member in self._members:
            member.watch = asyncio.create_task(self._watch(member))

    async def close(self) -> None:
        """End every call on every server."""
        for member in self._members:
            await member.close()

    async def join(self, engine: E) -> None:
        """Be this engine, too, which has been started.

        Raises:
            UsageError: it is no server of the same model.
        """
        self._info = _common([self.info, engine.info])
        member = _Member(engine)
        self._members.append(member)
        member.watch = asyncio.create_task(self._watch(member))
        log.warning("engine %s has joined", member.name)
        async with self.changed:
            self.changed.notify_all()

    async def let_go(self, listed: Collection[str]) -> None:
        """Forget the servers that are out, have no call under way, and are not among the ``listed`` addresses."""
        gone = [each for each in self._members if not (each.healthy or each.inflight or each.name in listed)]
        self._members = [member for member in self._members if member not in gone]
        for member in gone:
            await member.close()
        if gone:
            async with self.changed:
                self.changed.notify_all()

    async def _calls(self, affinity: str, call: Callable[[E], AsyncIterator[C]]) -> AsyncGenerator[C, None]:
        """One call's chunks: from the session's server, or from another if that fails before the first token."""
        tried: list[_Member[E]] = []
        while True:
            member = self._choose(affinity, tried)
            tried.append(member)
            begun = False
            member.inflight += 1
            chunks = call(member.engine)
            try:
                while (chunk := await (anext(chunks, None) if begun else self._first(chunks, tried))) is not None:
                    begun = begun or _seen(chunk)
                    yield chunk
                return
            except EngineError as error:
                await self._judge(member, error)
                if begun or not _may_pass(error) or len(tried) == min(len(self._members), MOST_TRIES):
                    raise
                log.warning("%s failed before the first token (%s): the call goes to another", member.name, error)
            finally:
                member.inflight -= 1
                await close_now(chunks)

    async def _first(self, chunks: AsyncIterator[C], tried: Sequence[_Member[E]]) -> C | None:
        """The next chunk of a call of which nothing has been seen; ``None``: there is none.

        Raises:
            EngineError: the call's own; or its server, the last of ``tried``, was found to hang (its connections stay
                open, so that the call alone would wait for ever), and there is another.
        """
        step = asyncio.ensure_future(anext(chunks, None))
        hopeless = asyncio.create_task(self._hopeless(tried))
        try:
            await asyncio.wait((step, hopeless), return_when=asyncio.FIRST_COMPLETED)
            if step.done():
                return step.result()
            raise EngineError("unavailable", f"{tried[-1].name} does not answer")
        finally:
            step.cancel()
            hopeless.cancel()
            await asyncio.gather(step, hopeless, return_exceptions=True)

    async def _hopeless(self, tried: Sequence[_Member[E]]) -> None:
        """Until the last server of ``tried`` is out, and another one, that may be tried, is not."""

        def found() -> bool:
            left = [each for each in self._members if each.healthy and each not in tried]
            return not tried[-1].healthy and bool(left) and len(tried) < MOST_TRIES

        async with self.changed:
            await self.changed.wait_for(found)

    # ---- which server ------------------------------------------------------------------------------------

    def _choose(self, affinity: str, tried: Sequence[_Member[E]]) -> _Member[E]:
        """The session's server; for a new session, or where that is out, the one with the least under way. If all
        are out one is tried all the same: it may be back."""
        now = asyncio.get_running_loop().time()
        self._forget(now)
        home = self._homes.get(affinity)
        if home is None or not home.member.healthy or home.member in tried:
            left = [member for member in self._members if member not in tried]
            member = min(
                [member for member in left if member.healthy] or left, key=lambda each: (each.inflight, each.sessions)
            )
            if home is not None:
                home.member.sessions -= 1
            member.sessions += 1
            home = self._homes[affinity] = _Home(member)
        home.used = now
        self._homes.move_to_end(affinity)
        return home.member

    def _any(self) -> E:
        """A server for what belongs to no session and leaves nothing behind."""
        return min(self._members, key=lambda each: (not each.healthy, each.inflight)).engine

    def _forget(self, now: float) -> None:
        """Let go of the sessions that have not called for long: they stand in front."""
        while self._homes:
            affinity, home = next(iter(self._homes.items()))
            if now - home.used < self._idle_seconds:
                return
            home.member.sessions -= 1
            del self._homes[affinity]

    # ---- health ------------------------------------------------------------------------------------------

    async def _judge(self, member: _Member[E], error: EngineError) -> None:
        """A failed connection takes a server out. A status is an answer: the server is there."""
        if error.kind == "unavailable" and error.status is None:
            await self._set_health(member, str(error))

    async def _set_health(self, member: _Member[E], failure: str | None) -> None:
        if member.healthy is (failure is None):
            return
        member.healthy = failure is None
        if failure is None:
            log.warning("engine %s answers again", member.name)
        else:
            log.warning("engine %s is left out until it answers again: %s", member.name, failure)
        async with self.changed:
            self.changed.notify_all()

    async def _watch(self, member: _Member[E]) -> None:
        """Look at a server again and again."""
        while True:
            await asyncio.sleep(self._probe_seconds)
            failure: str | None = None
            if isinstance(member.engine, Checkable):
                try:
                    await member.engine.check()
                except Exception as error:  # whatever it is, the next look comes
                    failure = str(error) or type(error).__name__
            await self._set_health(member, failure)


class TokenPool(Pool[E]):
    """Several token engines as one."""

    def generate(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        stop_ids: frozenset[int],
        request_id: str,
        affinity: str,
        response_format: dict[str, Any] | None = None,
        stream: bool = True,
    ) -> AsyncGenerator[TokenChunk, None]:
        """See ``TokenEngine``."""

        def call(engine: E) -> AsyncIterator[TokenChunk]:
            return cast(TokenEngine, engine).generate(
                prompt_ids,
                sampling,
                stop_ids=stop_ids,
                request_id=request_id,
                affinity=affinity,
                response_format=response_format,
                stream=stream,
            )

        return self._calls(affinity, call)


class ChatPool(Pool[E]):
    """Several chat engines as one."""

    def chat(
        self, chat: Chat, *, request_id: str, affinity: str, stream: bool = True, expected: Ids = NO_IDS
    ) -> AsyncGenerator[ChatChunk, None]:
        """See ``ChatEngine``."""

        def call(engine: E) -> AsyncIterator[ChatChunk]:
            return cast(ChatEngine, engine).chat(
                chat, request_id=request_id, affinity=affinity, stream=stream, expected=expected
            )

        return self._calls(affinity, call)

    async def count(self, chat: Chat) -> int:
        """See ``CountingEngine``."""
        engine = self._any()
        if not isinstance(engine, CountingEngine):
            raise EngineError("bad_request", f"{engine.info.url} does not count the tokens of a chat", status=404)
        return await engine.count(chat)


class ServerPool(TokenPool[E], ChatPool[E]):
    """Several engines that are both as one; which it is they say at the start, all alike."""


class RenderingPool(ServerPool[E]):
    """Several servers that render and parse too, as one."""

    async def render(self, chat: Chat) -> Ids:
        """See ``RenderingEngine``."""
        return await cast(RenderingEngine, self._any()).render(chat)

    async def read(self, chat: Chat, prompt_ids: Ids, ids: Sequence[int], finish_reason: FinishReason) -> Message:
        """See ``RenderingEngine``."""
        return await cast(RenderingEngine, self._any()).read(chat, prompt_ids, ids, finish_reason)


def pool_of(engines: Sequence[Engine]) -> Engine:
    """Several engines, not yet started, as one; a single one as it is.

    Raises:
        UsageError: some take token ids and others only messages.
    """
    if len(engines) == 1:
        return engines[0]
    # An engine that has not been started can't be asked what it is: its methods tell.
    renders, tokens, chats = (
        all(hasattr(type(engine), method) for engine in engines) for method in ("render", "generate", "chat")
    )
    if tokens and chats:
        return RenderingPool(engines) if renders else ServerPool(engines)
    if tokens:
        return TokenPool(engines)
    if chats:
        return ChatPool(engines)
    raise UsageError("some of these engines take token ids and others only chats: name engines of one --engine kind")


def _seen(chunk: _Chunk) -> bool:
    """Whether somebody downstream has seen something of the reply. Prompt ids are the same from every server."""
    return bool(chunk.ids or getattr(chunk, "deltas", ())) or chunk.finish_reason is not None


def _may_pass(error: EngineError) -> bool:
    """Whether another server may do better."""
    return error.kind == "overloaded" or (error.kind == "unavailable" and error.status in (None, 502, 504))


def _common(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What all of them are.

    Raises:
        UsageError: one differs from the first in what makes its tokens others.
    """
    first = infos[0]
    for other in infos[1:]:
        for what, ours, theirs in (
            ("the model", first.tokenizer or first.model, other.tokenizer or other.model),
            ("the weights in", first.model_path, other.model_path),
            ("logprobs that are", first.logprobs, other.logprobs),
            ("calls in mode", _mode(first), _mode(other)),
        ):
            if ours != theirs:
                raise UsageError(
                    f"{other.url} serves {what} {theirs}, but {first.url} {ours}: engines of one pool must be alike"
                )
    return replace(
        first,
        context_length=min(info.context_length for info in infos),
        structured=all(info.structured for info in infos),
    )


def _mode(info: EngineInfo) -> str:
    return "chat" if info.chat_only else info.mode or "tito"
