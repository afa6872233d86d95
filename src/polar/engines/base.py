"""The protocols of inference engines.

A token engine takes prompt ids and gives sampled ids. A chat engine takes messages, renders and parses by
itself, and must say which ids it used. Closing the async iterator that a call returns ends the generation
and frees its slot; a caller that loses interest does just that.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import Chat, Delta, FinishReason, Message, Sampling, Usage
from polar.contract.completion import LogprobKind, Mode, WeightSpan

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
    ``context_length`` is 0 where the engine does not say. ``logprobs``: what its logprobs are of.

    ``mode`` is how the user wants it used (``None``: the best there is). An engine may have the methods of several
    protocols and yet not be able to serve them all, by its version or how it was started: ``chat_only`` says why
    it can't take token ids; ``renders`` that it is a ``RenderingEngine``; ``structured`` that ``generate`` can hold
    a reply to a ``response_format``; ``template_args`` that ``chat`` gets them to the template.

    ``tokenizer``: what tells a server from others that serve another model, where ``model`` does not: SGLang calls
    itself by the path of its newest weights, and its tokenizer stays.
    """

    kind: str
    model: str
    context_length: int
    model_path: str | None = None
    version: str | None = None
    url: str | None = None
    logprobs: LogprobKind = "unknown"
    mode: Mode | None = None
    chat_only: str | None = None
    renders: bool = False
    structured: bool = False
    template_args: bool = True
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Newly sampled ids with their logprobs (natural log, as many) and the weight version they were sampled
    under. The last chunk of a generation has ``finish_reason``; it may carry ids too.

    An engine that names its weight versions only at the end does so in ``weight_spans`` of the last chunk: spans
    of all that this generation sampled, from its first token on. ``usage`` is the engine's own count, there as well,
    and ``stop_sequence`` the stop string that it ended at, where it looks for them. ``doubt``: why the ids up to here
    are not just those that were sampled, where that shows.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    weight_version: str | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    weight_spans: Sequence[WeightSpan] = field(default=())
    usage: Usage | None = None
    stop_sequence: str | None = None
    doubt: str | None = None


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """A piece of a chat engine's reply: what the client sees, and the ids behind it.

    ``prompt_ids`` come once. The last chunk has ``finish_reason``, the engine's own ``usage`` (``None`` where it
    sends none), the whole ``message``, and in ``doubt`` why the ids are not just those that were sampled, where that
    shows. Ids and logprobs pair up over the whole reply, not chunk by chunk: some engines send the ids at the end.
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
    doubt: str | None = None


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
class Checkable(Protocol):
    """An engine that can be asked cheaply whether it is there."""

    async def check(self) -> None:
        """Ask.

        Raises:
            EngineError: ``unavailable``: nothing answers, or it says that it is not well.
        """
        ...


@runtime_checkable
class TokenEngine(Engine, Protocol):
    """Ids in, ids out."""

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
    ) -> AsyncIterator[TokenChunk]:
        """Sample a reply. It ends at one of ``stop_ids``, which is its last id then; ``affinity`` names the session,
        for engines that keep its prefix warm.

        ``response_format`` (``{"type": "json_object"}``, or ``json_schema`` with a schema, in OpenAI's shape) binds
        the reply; it is given only to an engine whose ``info.structured`` says that it can.

        Without ``stream`` nobody looks at the reply before its end: it may come as one chunk, which costs much less.

        Stop strings are the caller's business: it closes the iterator. An engine that looks for ``sampling.stop``
        itself may end there.

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


@runtime_checkable
class CountingEngine(Protocol):
    """A chat engine that can say how long a prompt is."""

    async def count(self, chat: Chat) -> int:
        """Tokens of the prompt of a conversation, without generating.

        Raises:
            EngineError: it can't tell; ``bad_request`` where its template refuses the conversation.
        """
        ...


@runtime_checkable
class RenderingEngine(TokenEngine, Protocol):
    """A token engine that also renders and parses, apart from sampling: where there is no tokenizer on our side."""

    async def render(self, chat: Chat) -> Ids:
        """The prompt of a conversation by the engine's own template, with the generation prompt.

        Raises:
            EngineError: it can't; ``bad_request`` where its template refuses the conversation.
        """
        ...

    async def read(self, chat: Chat, prompt_ids: Ids, ids: Sequence[int], finish_reason: FinishReason) -> Message:
        """A sampled reply, parsed. ``ids`` are those of its text, without an id that ended it; a stop string that
        ended it is text.

        Raises:
            EngineError: it can't.
        """
        ...


async def close_now(chunks: AsyncIterator[object]) -> None:
    """End a generation now, so that its slot is free now and not when the iterator is collected."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()
