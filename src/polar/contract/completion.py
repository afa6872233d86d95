"""A completion: one captured model call, stored as what it adds to the conversation before it.

A completion does not repeat its context. Its ``base`` is an earlier completion of the session whose
tokens (prompt, then reply) begin with the same ids; only what differs is stored, so a session grows
with its tokens and not with turns times tokens:

    prompt ids  = (base prompt ids + base response ids)[:shared] + prompt_delta
    messages    = (base messages + base reply)[:shared_messages] + messages

``parent_id`` says what the call *means*: the completion whose messages and reply this conversation
starts with. Parent and base are the same completion whenever there is a parent. The context is exact
across the two (they belong to one trace) when ``shared`` is all of the parent's tokens.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from polar.contract.arrays import NO_FLOATS, NO_IDS, Floats, Ids
from polar.contract.chat import FinishReason, Message, Sampling, Tool, Usage

Outcome = Literal[
    "ok",  # the reply is whole and its tokens verified
    "abandoned",  # the client went away and did not come back
    "aborted",  # the engine stopped it
    "engine_error",  # the engine failed before the reply was whole
    "no_token_ids",  # the engine returned no token ids
    "token_mismatch",  # ids, usage and finish reason contradict each other
    "logprob_missing",  # no logprob, or one that is no finite number, or a sentinel
    "empty",  # nothing was sampled
    "redacted",  # text was taken out before it was stored, and with it the token ids, which say the same
]
"""How a call ended, which decides whether it may be trained: only ``ok`` may."""

Mode = Literal["tito", "chat"]
"""``tito``: Polar renders, token ids in and out. ``chat``: the engine renders, Polar records."""


LogprobKind = Literal["raw", "temperature", "processed", "unknown"]
"""Which distribution an engine's logprobs belong to: the model's own (``raw``), the model's at the sampling
temperature, before penalties and truncation (``temperature``), or the one a token was drawn from (``processed``)."""


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens ``[start, end)`` were sampled under this weight version (the engine's own word)."""

    version: str
    start: int
    end: int


class Completion(msgspec.Struct, kw_only=True):
    """One captured model call. Token arrays are int32, logprobs float32 natural logs."""

    completion_id: str
    session_id: str
    attempt: int
    seq: int
    """Order in which calls of the attempt began (0, 1, ...). A base has always ended before what builds on it
    began, so in this order a graph can be rebuilt."""
    parent_id: str | None = None
    base_id: str | None = None
    shared: int = 0
    shared_messages: int = 0
    split: str | None = None
    """Why the context is not its parent's tokens and more (``None`` where it is)."""

    created_at: float
    finished_at: float
    dialect: str
    mode: Mode
    model_requested: str
    model_used: str
    messages: tuple[Message, ...] = ()
    """The conversation after its first ``shared_messages`` messages."""
    reply: Message
    tools: tuple[Tool, ...] = ()
    sampling: Sampling = Sampling()
    request_digest: bytes = b""
    """A digest of dialect and what is asked: what makes a retry the same call."""
    idempotency_key: str | None = None

    prompt_delta: Ids = msgspec.field(default_factory=lambda: NO_IDS)
    response_ids: Ids = msgspec.field(default_factory=lambda: NO_IDS)
    logprobs: Floats = msgspec.field(default_factory=lambda: NO_FLOATS)
    weight_spans: tuple[WeightSpan, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_sequence: str | None = None
    usage: Usage = Usage(0, 0)
    outcome: Outcome = "ok"
    detail: str | None = None
    """One line behind an outcome that is not ``ok``: the field, the URL, the engine's words."""
    role_hint: str | None = None
    """What the harness itself said this call is (``subagent``, ``auxiliary``), if it said."""
    metadata: dict[str, Any] = {}

    @property
    def plain(self) -> bool:
        """Its prompt was plain text or token ids; its messages only tell what was given and what was sampled."""
        return bool(self.metadata.get("plain"))

    @property
    def prompt_len(self) -> int:
        """Tokens of the whole prompt."""
        return self.shared + len(self.prompt_delta)

    @property
    def total_len(self) -> int:
        """Tokens of the whole prompt and the reply."""
        return self.shared + len(self.prompt_delta) + len(self.response_ids)
