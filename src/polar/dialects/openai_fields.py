"""Request fields that OpenAI's three APIs have in common, read in one way, and what is said of those that are not
heeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from polar.contract.chat import Message, Sampling
from polar.dialects.base import CallError, Tokens, decode
from polar.dialects.unheeded import unheeded

_NEUTRAL = (
    "client_metadata",
    "max_tool_calls",  # of the vendor's own tools
    "metadata",
    "modalities",  # a reply in sound takes "audio", too
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
)
"""Fields without which the reply would be the same."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def unread(body: bytes, read: type[msgspec.Struct]) -> list[str]:
    """A warning for each field of a request that asks for something and that ``read`` does not have."""
    given: dict[str, msgspec.Raw] = decode(_fields, body)
    return unheeded(given, read, _NEUTRAL)


def parallel(allowed: bool | None, tools: bool) -> list[str]:
    """A warning where one call at most is wanted."""
    wanted = tools and allowed is False
    return (
        ["parallel_tool_calls: false is not enforced: the model may make several calls in a reply"] if wanted else []
    )


def ends_in_reply(messages: Sequence[Message]) -> list[str]:
    """A warning where the conversation ends with words of the model."""
    told = bool(messages) and messages[-1].role == "assistant"
    return ["the last message is the assistant's: the reply is a turn of its own and does not go on from it"] * told


def token_limit(limit: int | None, field: str) -> int | None:
    """How many tokens a reply may have.

    Raises:
        CallError: ``bad_request``: it may have none.
    """
    if limit is not None and limit < 1:
        raise CallError("bad_request", f"'{field}' must be at least 1, and is {limit}")
    return limit


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to sample, as the Chat API and plain completions both say it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


def sampling(request: SamplingFields, limit: int | None) -> Sampling:
    """The sampling of a request; ``limit`` is how many tokens the reply may have.

    Raises:
        CallError: ``bad_request``, naming the field.
    """
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    try:
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()} or None
    except ValueError:
        raise CallError("bad_request", "'logit_bias' must map token ids to numbers") from None
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        max_tokens=limit,
        stop=tuple(text for text in stop if text),
        seed=request.seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias,
    )


def other_choice(kind: Any, mode: Any, warnings: list[str]) -> str | None:
    """A tool choice that names no function, with a warning; ``mode`` is that of ``allowed_tools``."""
    warnings.append(f"tool_choice of type '{kind}' was not heeded: the model may call any function")
    return mode if kind == "allowed_tools" and mode in ("auto", "required") else None


def token_names(tokens: Tokens, *, as_ids: bool = False) -> list[str]:
    """The text of each sampled token; where there is no tokenizer (or ``as_ids``), ``token_id:N``, as engines say."""
    text = None if as_ids else tokens.text
    return [f"token_id:{token}" if text is None else text(token) for token in tokens.ids.tolist()]
