"""Between the contract's objects and what is kept on disk, exactly, in about the bytes that are new.

Token arrays are raw little-endian int32 and float32; everything said is JSON. Pieces that come back with
every call of a session or every sample of a task (the tools list, a long system prompt, the ids of a first
prompt) are kept once, under their SHA-256 digest, and the row has the digest instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from polar.contract.arrays import from_json, to_json, to_plain
from polar.contract.chat import FinishReason, Message, Sampling, Tool, Usage
from polar.contract.completion import Completion, Mode, Outcome, WeightSpan
from polar.contract.result import SessionResult

SHARED_FROM = 4096
"""Opening messages and prompt ids of this many bytes or more are kept by digest; smaller ones inline."""

T = TypeVar("T")
Lookup = Callable[[bytes], bytes]
"""From a digest to the bytes kept under it."""


def dumps(value: Any) -> bytes:
    """JSON bytes. Text with lone surrogates (an emoji that a JavaScript tool cut in two) is kept as escapes."""
    try:
        return to_json(value)
    except UnicodeEncodeError:
        return json.dumps(to_plain(value)).encode("ascii")


def loads(data: bytes, kind: type[T]) -> T:
    """What ``dumps`` was given."""
    try:
        return from_json(data, kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(json.loads(data), type=kind, str_keys=True)


class Head(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The small fields of a completion: one JSON object a row. Named as in the contract, defaults left out."""

    parent_id: str | None = None
    base_id: str | None = None
    shared: int = 0
    shared_messages: int = 0
    split: str | None = None
    created_at: float
    finished_at: float
    dialect: str
    mode: Mode
    model_requested: str
    model_used: str
    reply: Message
    sampling: Sampling = Sampling()
    request_digest: bytes = b""
    idempotency_key: str | None = None
    weight_spans: tuple[WeightSpan, ...] = ()
    finish_reason: FinishReason = "stop"
    stop_sequence: str | None = None
    usage: Usage = Usage(0, 0)
    outcome: Outcome = "ok"
    detail: str | None = None
    role_hint: str | None = None
    metadata: dict[str, Any] = {}


HEAD_FIELDS = Head.__struct_fields__


class CompletionRow(NamedTuple):
    """A completion as it is kept. ``tools`` and ``prompt_ref`` are digests; ``prompt`` is None beside a ref."""

    head: bytes
    messages: bytes
    tools: bytes | None
    prompt: bytes | None
    prompt_ref: bytes | None
    response: bytes
    logprobs: bytes


def encode_completion(completion: Completion) -> tuple[CompletionRow, dict[bytes, bytes]]:
    """The row, and the shared pieces that it refers to."""
    shared: dict[bytes, bytes] = {}

    def keep(data: bytes) -> bytes:
        digest = hashlib.sha256(data).digest()
        shared[digest] = data
        return digest

    opening = completion.parent_id is None  # only what opens a conversation is said again elsewhere
    messages = []
    for message in completion.messages:
        data = dumps(message)
        # In the JSON list an object is the message itself, a string the digest of one.
        large = opening and len(data) >= SHARED_FROM
        messages.append(b'"%s"' % keep(data).hex().encode() if large else data)
    prompt = _to_bytes(completion.prompt_delta, "<i4")
    large = opening and len(prompt) >= SHARED_FROM
    row = CompletionRow(
        head=dumps(Head(**{name: getattr(completion, name) for name in HEAD_FIELDS})),
        messages=b"[%s]" % b",".join(messages),
        tools=keep(dumps(completion.tools)) if completion.tools else None,
        prompt=None if large else prompt,
        prompt_ref=keep(prompt) if large else None,
        response=_to_bytes(completion.response_ids, "<i4"),
        logprobs=_to_bytes(completion.logprobs, "<f4"),
    )
    return row, shared


class CompletionReader:
    """Rows back to completions. Tools that many calls share are decoded once, and shared in memory too."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._tools: dict[bytes, tuple[Tool, ...]] = {}

    def decode(self, completion_id: str, session_id: str, attempt: int, seq: int, row: CompletionRow) -> Completion:
        """The completion, equal to the one that was encoded. Its arrays are read-only."""
        head = loads(row.head, Head)
        prompt = row.prompt if row.prompt_ref is None else self._lookup(row.prompt_ref)
        return Completion(
            completion_id=completion_id,
            session_id=session_id,
            attempt=attempt,
            seq=seq,
            messages=tuple(self._message(item) for item in loads(row.messages, list[Message | str])),
            tools=self._tool_list(row.tools),
            prompt_delta=np.frombuffer(prompt or b"", dtype="<i4"),
            response_ids=np.frombuffer(row.response, dtype="<i4"),
            logprobs=np.frombuffer(row.logprobs, dtype="<f4"),
            **{name: getattr(head, name) for name in HEAD_FIELDS},
        )

    def _message(self, item: Message | str) -> Message:
        return loads(self._lookup(bytes.fromhex(item)), Message) if isinstance(item, str) else item

    def _tool_list(self, digest: bytes | None) -> tuple[Tool, ...]:
        if digest is None:
            return ()
        if digest not in self._tools:
            self._tools[digest] = loads(self._lookup(digest), tuple[Tool, ...])
        return self._tools[digest]


def encode_result(result: SessionResult) -> bytes:
    """The result without its traces."""
    bare = msgspec.structs.replace(result.trajectory, traces=[])
    return dumps(msgspec.structs.replace(result, trajectory=bare))


def tokens_trained(result: SessionResult) -> int:
    """How many tokens the traces of a stored result train, if it ended without an error."""
    reconstruction = result.trajectory.metadata.get("reconstruction")
    if result.status != "COMPLETED" or not isinstance(reconstruction, dict):
        return 0
    trained = reconstruction.get("tokens_trained")
    return trained if isinstance(trained, int) else 0


def by_digest(messages: bytes) -> list[bytes]:
    """The digests that a row's messages refer to."""
    return [bytes.fromhex(item) for item in loads(messages, list[Any]) if isinstance(item, str)]


def _to_bytes(array: npt.NDArray[Any], dtype: str) -> bytes:
    if array.dtype != np.dtype(dtype) or array.ndim != 1:
        raise ValueError(f"a completion's arrays are one-dimensional {dtype}, not {array.dtype} {array.shape}")
    return array.tobytes()
