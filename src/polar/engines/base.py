"""The protocols of inference engines.

A token engine takes prompt ids and gives sampled ids. A chat engine takes messages, renders and parses by
itself, and must say which ids it used. Closing the async iterator that a call returns ends the generation
and frees its slot; a caller that loses interest does just that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat, Delta, FinishReason, Message, Sampling, Usage
from polar.contract.completion import WeightSpan

ErrorKind = Literal["bad_request", "context_length", "overloaded", "unavailable", "no_token_ids", "internal"]


class EngineError(Exception):
    """An engine could not serve a call. ``message`` is one line with the URL or field at fault.

    ``kind`` decides what the harness is told: ``bad_request`` and ``context_length`` are final (4xx),
    ``overloaded`` and ``unavailable`` may be tried again, ``no_token_ids`` ends the session. Under
    ``context_length``, ``prompt_tokens`` and ``context_length`` are the engine's own numbers, if it gave any.
    """

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        status: int | None = None,
        prompt_tokens: int | None = None,
        context_length: int | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.status = status
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine serves. ``model_path`` is a folder with tokenizer and template, where it has one;
    ``context_length`` is 0 where the engine does not say."""

    kind: str
    model: str
    context_length: int
    model_path: str | None = None
    version: str | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Newly sampled ids with their logprobs (natural log, as many) and the weight version they were sampled
    under. The last chunk of a generation has ``finish_reason``; it may carry ids too."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: str | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """A piece of a chat engine's reply: what the client sees, and the ids behind it.

    ``prompt_ids`` come once. The last chunk has ``finish_reason``, ``usage`` and the whole ``message``. Ids and
    logprobs pair up over the whole reply, not chunk by chunk: some engines send the ids at the end.
    """

    deltas: Sequence[Delta] = ()
    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    prompt_ids: Ids | None = None
    message: Message | None = None
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    usage: Usage | None = None
    weight_spans: Sequence[WeightSpan] = field(default=())


@runtime_checkable
class Engine(Protocol):
    """What every engine can do."""

    @property
    def info(self) -> EngineInfo:
        """What it serves; known after ``start``."""
        ...

    async def start(self) -> None:
        """Connect or load.

        Raises:
            UsageError: the model or URL is wrong; the message says what to do.
        """
        ...

    async def close(self) -> None:
        """End every generation and let go of everything. Safe to call twice."""
        ...


@runtime_checkable
class TokenEngine(Engine, Protocol):
    """Ids in, ids out."""

    def generate(
        self, prompt_ids: Ids, sampling: Sampling, *, stop_ids: frozenset[int], request_id: str, affinity: str
    ) -> AsyncIterator[TokenChunk]:
        """Sample a reply. ``affinity`` names the session, for engines that keep its prefix warm.

        Stop strings are the caller's business: it closes the iterator.

        Raises:
            EngineError: at the first step or in the middle.
        """
        ...


@runtime_checkable
class ChatEngine(Engine, Protocol):
    """Messages in; text, and the ids behind it, out."""

    def chat(
        self, chat: Chat, *, request_id: str, affinity: str, stream: bool = True, expected: Ids = NO_IDS
    ) -> AsyncGenerator[ChatChunk, None]:
        """Sample a reply: piece by piece, or with ``stream=False`` as one chunk, which costs less.

        ``expected`` are ids with which the prompt probably begins. It changes nothing but the time that reading
        the engine's own ids takes.

        Raises:
            EngineError: at the first step or in the middle; ``no_token_ids`` names the missing field and URL.
        """
        ...
