"""A session attempt while it lives: its key, its context graph, its calls."""

from __future__ import annotations

import itertools
import logging
import secrets
from dataclasses import dataclass, field

import msgspec

from polar.capture.graph import SessionGraph
from polar.capture.retries import RetryLedger
from polar.contract.chat import Chat, Sampling
from polar.dialects.base import Call, PreviousNotFound
from polar.gateway.call import ModelCall
from polar.gateway.digests import CallDigests
from polar.gateway.plain_prompts import PlainIndex
from polar.redaction import SessionRedaction

log = logging.getLogger("polar.gateway")


MOST_TOLD = 1000
"""Lines that a gateway remembers to have logged."""
MOST_OF_AN_ERROR = 500
"""Characters: an error may quote what a harness sent, which has no end."""


def new_key(worker: int | None = None) -> str:
    """A session key: 256 random bits, and which of the workers behind one port has the session."""
    return f"sk-polar-{'' if worker is None else f'{worker}.'}{secrets.token_urlsafe(32)}"


@dataclass(eq=False)
class LiveSession:
    """One session attempt that may make model calls.

    ``pins`` win over what the harness asks for. ``broken`` is why the session can't end well, once it can't.
    """

    session_id: str
    task_id: str | None = None
    attempt: int = 1
    pins: Sampling = field(default_factory=Sampling)
    key: str = field(default_factory=new_key)
    require_token_ids: bool = True
    graph: SessionGraph = field(default_factory=SessionGraph)
    ledger: RetryLedger[ModelCall] = field(default_factory=RetryLedger)
    digests: CallDigests = field(default_factory=CallDigests)
    states: dict[str, object] = field(default_factory=dict)
    plain: PlainIndex = field(default_factory=PlainIndex)
    calls: set[ModelCall] = field(default_factory=set)
    closed: bool = False
    broken: str | None = None
    unkept: str | None = None
    """Why a call could not be stored, if there was one: the store's fault, and not the session's."""
    refusals: int = 0
    """Calls that were answered with an error."""
    refusal: str = ""
    """The newest of these errors."""
    sequence: itertools.count[int] = field(default_factory=itertools.count)
    warned: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """What the log has of any session: shared by those of one gateway."""
    used_at: float = 0.0
    """When the newest call came (``time.monotonic``)."""
    redaction: SessionRedaction | None = None

    def whole(self, call: Call) -> Chat:
        """The call with its whole conversation, where it sent only what is new since an earlier reply.

        Raises:
            PreviousNotFound: that reply is not in this session.
        """
        if call.previous_id is None:
            return call.chat
        previous = self.graph.get(call.previous_id)
        if previous is None:
            raise PreviousNotFound(call.previous_id)
        earlier = self.graph.conversation(previous)[previous.metadata.get("instructions", 0) :]
        own, new = call.chat.messages[: call.instructions], call.chat.messages[call.instructions :]
        return msgspec.structs.replace(call.chat, messages=(*own, *earlier, *new))

    def pinned(self, chat: Chat) -> Chat:
        """The call with the task's sampling settings over the harness's own; ``max_tokens`` is a bound."""
        asked, pins = chat.sampling, self.pins
        changes = {
            name: value
            for name in Sampling.__struct_fields__
            if (value := getattr(pins, name)) is not None and value != ()
        }
        if pins.max_tokens is not None and asked.max_tokens is not None:
            changes["max_tokens"] = min(pins.max_tokens, asked.max_tokens)
        if not changes:
            return chat
        return msgspec.structs.replace(chat, sampling=msgspec.structs.replace(asked, **changes))

    @property
    def ids(self) -> dict[str, str | int]:
        """What log lines about it name."""
        task = {} if self.task_id is None else {"task_id": self.task_id}
        return {**task, "session_id": self.session_id, "attempt": self.attempt}

    def warn(self, line: str) -> None:
        """Log something that concerns all of the session, once; for the later ones of thousands of sessions that it
        concerns as well, at debug level."""
        if line in self.warned:
            return
        self.warned.add(line)
        log.log(logging.DEBUG if line in self.told else logging.WARNING, "session %s: %s", self.session_id, line)
        if len(self.told) >= MOST_TOLD:  # a line may name what a harness sent, which has no end
            self.told.clear()
        self.told.add(line)

    def refuse(self, why: str) -> None:
        """A call of it is answered with an error: what it is told, on one line."""
        self.refusals += 1
        self.refusal = " ".join(why.split())[:MOST_OF_AN_ERROR].rstrip(".")

    def end_broken(self, why: str) -> None:
        """The session can't end well any more: take no more calls, and keep the first reason."""
        self.broken = self.broken or why
        self.closed = True

    async def close(self) -> None:
        """Take no more calls; give up those in flight and wait until they are recorded."""
        self.closed = True
        for call in list(self.calls):
            call.give_up()
        for call in list(self.calls):
            await call.settled()
