"""The protocol of dialects: one provider API each, in one pure file with the same sections in the same
order (parse request, encode reply, encode stream, errors, side routes), so that two can be read side by
side.

A dialect knows bytes and shapes. It knows no session, no engine and no tokenizer: those are the gateway's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from polar.contract.arrays import Floats, Ids
from polar.contract.chat import Chat, Delta, FinishReason, Message, Usage

ErrorKind = Literal[
    "bad_request",  # 400: the body does not make sense
    "unauthorized",  # 401: no such key
    "not_found",  # 404: no such route or model
    "conflict",  # 400: the same idempotency key with another body
    "gone",  # 410: the session is over
    "too_large",  # 413: the body is over the limit
    "context_length",  # 400, in the words that make harnesses compact
    "overloaded",  # 503: try again
    "unavailable",  # 502: the engine failed
    "internal",  # 500: our own fault
]


class CallError(Exception):
    """A call that gets an error instead of a reply. Each dialect puts it into its provider's shape."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.retry_after = retry_after


T = TypeVar("T")


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """A request body as its dialect's own type.

    Raises:
        CallError: ``bad_request``, with the field at fault.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CallError("bad_request", f"The request body is not valid: {error}") from None


def told_role(headers: Mapping[str, str]) -> str | None:
    """``subagent`` where a harness says so in a header of its own, whatever API it speaks (opencode names the
    session that sent this one)."""
    return "subagent" if headers.get("x-parent-session-id") else None


class PreviousNotFound(CallError):
    """The earlier reply that a call goes on from (``Call.previous_id``) is not in its session."""

    def __init__(self, previous_id: str) -> None:
        super().__init__("not_found", f"No earlier reply {previous_id} in this session: send the whole conversation")
        self.previous_id = previous_id


Action = Literal["generate", "count", "models", "model", "upgrade_refused"]
"""``upgrade_refused``: a WebSocket is asked for where only plain HTTP is served (426)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A path of this API. ``pattern`` is a regular expression over the whole path (a leading
    ``/s/{key}`` is taken off before); its named groups become the path variables."""

    method: str
    pattern: str
    action: Action
    header: str | None = None
    """A lower-case header that only this API's clients send: it decides where two APIs have the same path."""


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request. ``options`` is the dialect's own (what its encoder must know)."""

    chat: Chat
    stream: bool
    options: Any = None
    warnings: tuple[str, ...] = ()
    """What was asked for and could not be honoured: one line each, naming the field."""
    role_hint: str | None = None
    previous_id: str | None = None
    """The completion whose whole conversation, reply included, stands before these messages."""
    instructions: int = 0
    """How many of the first messages hold for this call only: a call that names it as its previous one does not
    inherit them."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a reply, for an API whose clients may ask for them. ``prompt_ids`` gives all ids of the prompt,
    ``text`` the text of an id, where the tokenizer is at hand."""

    ids: Ids
    logprobs: Floats
    prompt_ids: Callable[[], Ids]
    text: Callable[[int], str] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply, ready for any dialect."""

    completion_id: str
    created: float
    model: str
    message: Message
    finish_reason: FinishReason
    stop_sequence: str | None
    usage: Usage
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response: a status and a body."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


class StreamEncoder(Protocol):
    """Encodes one streamed reply. The bytes of ``start``, ``delta``s and ``finish``, in that order, are what
    the provider would have sent. ``finish`` holds the terminal event: it is sent only once the completion is
    durable."""

    content_type: str
    keepalive: bytes
    """What may be sent while nothing happens; empty where this API's clients accept nothing."""

    def start(self, completion_id: str, created: float, model: str, prompt_tokens: int) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def finish(self, answer: Answer) -> bytes: ...

    def error(self, error: CallError) -> bytes:
        """The error as a last event, after which the connection is cut."""
        ...


class Dialect(Protocol):
    """One provider API."""

    name: str
    routes: Sequence[Route]

    def parse(self, body: bytes, headers: Mapping[str, str], path: Mapping[str, str]) -> Call:
        """A request body as a call. ``headers`` are lower-case; ``path`` has the route's variables and the
        query's.

        Raises:
            CallError: ``bad_request``, with the field at fault.
        """
        ...

    def encode(self, call: Call, answer: Answer) -> Response:
        """The whole reply."""
        ...

    def stream(self, call: Call) -> StreamEncoder:
        """An encoder for one streamed reply."""
        ...

    def error(self, error: CallError) -> Response:
        """An error in the provider's own shape."""
        ...

    def count(self, tokens: int) -> Response:
        """The answer to a ``count`` route."""
        ...

    def models(self, names: Sequence[str]) -> Response:
        """The answer to a ``models`` route."""
        ...

    def model(self, name: str) -> Response:
        """The answer to a ``model`` route."""
        ...
