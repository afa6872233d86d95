"""Why: engines write sampled tokens down in a handful of ways, and each way can lose one unseen. How an id, a
logprob, a finish reason and a weight version are read stands here once, for every engine behind a URL.

An id is read where it is given as one (``token_ids``, ``token_id``, or a token named ``token_id:N``), never made
up from text. A logprob that is no number (null, a boolean, NaN) becomes NaN: the reply is served, and not trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from polar.contract.chat import FinishReason, Usage
from polar.contract.completion import WeightSpan
from polar.engines.base import EngineError

T = TypeVar("T")

_END_OF_IDS = 2**31
Id = Annotated[int, msgspec.Meta(ge=-_END_OF_IDS, lt=_END_OF_IDS)]
"""An id as it is kept, in 32 bits; what is larger is none."""

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "content_filter": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


class WireLogprob(msgspec.Struct):
    """One entry of a list of logprobs. The logprob is ``Any``: null or a boolean must not end the call."""

    token: str | None = None
    logprob: Any = None
    token_id: Id | None = None


class WireSpan(msgspec.Struct):
    """Tokens ``[start, end)`` of a reply were sampled under a version."""

    version: Any
    start: int
    end: int


class WirePromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """OpenAI's counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: WirePromptDetails | None = None

    def counts(self) -> Usage:
        details = self.prompt_tokens_details
        cached = (details.cached_tokens or 0) if details is not None else 0
        return Usage(self.prompt_tokens or 0, self.completion_tokens or 0, cached)


def finish_reason(word: str) -> FinishReason:
    """Any word that is not known (``abort``, ``error``, ...) says that the engine stopped before the model did."""
    return _FINISH_REASONS.get(word, "abort")


def logprobs_of(entries: Sequence[WireLogprob]) -> list[float]:
    """The logprobs of some entries; NaN where one is no number."""
    return [value if type(value := entry.logprob) is float else number(value) for entry in entries]


def ids_of(entries: Sequence[WireLogprob]) -> list[int]:
    """The ids that entries name; fewer than there are entries, where some name none."""
    return [found for entry in entries if (found := _id_of(entry)) is not None]


def id_of_name(token: str | None) -> int | None:
    """N, of a token that is written ``token_id:N``."""
    head, mark, digits = (token or "").partition("token_id:")
    found = int(digits) if mark and not head and digits.isdecimal() else _END_OF_IDS
    return found if found < _END_OF_IDS else None


def number(value: Any) -> float:
    """A logprob as it came over the wire; NaN where it is no number."""
    return float(value) if type(value) in (float, int) else math.nan


def spans_of(spans: Sequence[WireSpan] | None) -> list[WeightSpan]:
    return [WeightSpan(str(span.version), span.start, span.end) for span in spans or ()]


def decode(payload: bytes, decoder: msgspec.json.Decoder[T], url: str, what: str) -> T:
    """A JSON object that ``url`` sent. Python servers write NaN and Infinity, which are no JSON: they are read as
    null, so that the call is served.

    Args:
        what: the object's name in an error.

    Raises:
        EngineError: ``unavailable``: it is no JSON, or another object.
    """
    try:
        return decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise EngineError("unavailable", f"{url} sent no {what}: {error}") from None
    except msgspec.DecodeError:
        pass
    try:
        return decoder.decode(orjson.dumps(json.loads(payload, parse_constant=lambda _: None)))
    except (ValueError, TypeError, msgspec.DecodeError) as error:
        raise EngineError("unavailable", f"{url} sent what is no JSON: {error}") from None


def _id_of(entry: WireLogprob) -> int | None:
    return entry.token_id if entry.token_id is not None else id_of_name(entry.token)
