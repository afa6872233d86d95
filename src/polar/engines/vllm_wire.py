"""Why: the two routes by which vLLM takes token ids, ``/inference/v1/generate`` and ``/v1/completions``, say the same
things under different names. Bodies for both are made here, and one reader reads both streams.

Only what is recorded is decoded: of a chunk of 400 bytes an id, a logprob and a word or two.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import Ids
from polar.contract.chat import FinishReason, Sampling, Usage
from polar.contract.completion import WeightSpan
from polar.engines.base import EngineError, TokenChunk
from polar.engines.openai_errors import error_of_event
from polar.engines.openai_request import sampling_fields, schema_of
from polar.engines.sampled import (
    Id,
    WireLogprob,
    WireSpan,
    WireUsage,
    decode,
    finish_reason,
    id_of_name,
    ids_of,
    logprobs_of,
    number,
    spans_of,
)

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"


def generate_body(
    prompt: Ids,
    sampling: Sampling,
    *,
    stop_ids: frozenset[int],
    model: str,
    room: int,
    response_format: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A streaming call for ``/inference/v1/generate``. ``room``: tokens that the context leaves; the limit where
    the call names none, for the route's own is 16 in some versions."""
    return {
        "model": model,
        "token_ids": np.ascontiguousarray(prompt),
        "sampling_params": _sampling(sampling, stop_ids, room, response_format),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def completions_body(
    prompt: Ids,
    sampling: Sampling,
    *,
    stop_ids: frozenset[int],
    model: str,
    room: int,
    response_format: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The same for ``/v1/completions``. Ids are asked for twice over: as they are, and (for servers before 0.10.2)
    as the names of the tokens in the logprobs."""
    return {
        "model": model,
        "prompt": np.ascontiguousarray(prompt),
        **_sampling(sampling, stop_ids, room, response_format),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


BODIES = {GENERATE: generate_body, COMPLETIONS: completions_body}


_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""What a call leaves open is said, too: completions would take it from the model's own generation config, and the
same call would sample otherwise by one route than by the other."""


def _sampling(
    sampling: Sampling, stop_ids: frozenset[int], room: int, response_format: dict[str, Any] | None
) -> dict[str, Any]:
    fields = {**_NEUTRAL, "max_tokens": max(1, room), **sampling_fields(sampling)}
    # Stop strings are looked for in all that was sampled, as our own reader does: then vLLM itself ends the reply,
    # and its last chunk, which names the weight versions, comes.
    if response_format is not None:
        fields["structured_outputs"] = {"json": schema_of(response_format)}
    return {**fields, "logprobs": 0, "stop_token_ids": sorted(stop_ids), "skip_special_tokens": False}


class WireLogprobs(msgspec.Struct):
    """``content`` in generate; the parallel lists in completions."""

    content: list[WireLogprob] | None = None
    tokens: list[str | None] | None = None
    token_logprobs: list[Any] | None = None


class WireChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[Id] | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    weight_versions: list[WireSpan] | None = None


class WireChunk(msgspec.Struct):
    choices: list[WireChoice] = []
    usage: WireUsage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(WireChunk)


class TokensReader:
    """Reads one reply of either route: JSON payloads in, ``TokenChunk``s out."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._seen = 0
        self._finish: FinishReason | None = None
        self._stop: str | None = None
        self._usage: Usage | None = None
        self._spans: list[WeightSpan] = []
        self._doubt: str | None = None

    def feed(self, payload: bytes) -> None:
        """One chunk of the stream.

        Raises:
            EngineError: it is an error, is no chunk, or begins with logprobs without ids (``no_token_ids``).
        """
        chunk = decode(payload, _decoder, self._endpoint, "stream of tokens")
        if chunk.error is not None:
            raise error_of_event(chunk.error, self._endpoint)
        for choice in chunk.choices:
            if choice.index == 0:
                self._read(choice)
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:  # a whole reply of generate has {}
            self._usage = chunk.usage.counts()

    def take(self) -> TokenChunk | None:
        """What has come since the last ``take``, or ``None``. Once the reply is known to end, the rest is
        ``finish``'s: what comes with it must not be missed by who stops there."""
        if self._finish is not None or not (self._ids or self._logprobs):
            return None
        ids, logprobs = self._ids, self._logprobs
        self._ids, self._logprobs = [], []
        return TokenChunk(ids, logprobs, doubt=self._doubt)

    def finish(self) -> TokenChunk:
        """The last chunk.

        Raises:
            EngineError: ``unavailable`` if no finish reason came, ``no_token_ids`` if no ids did.
        """
        if self._finish is None:
            raise EngineError("unavailable", f"{self._endpoint}: the reply ended without a finish reason")
        if not self._seen and self._finish != "abort":
            raise self._no_ids()
        return TokenChunk(
            self._ids,
            self._logprobs,
            finish_reason=self._finish,
            cached_tokens=self._usage.cached_tokens if self._usage else 0,
            usage=self._usage,
            weight_spans=self._spans,
            stop_sequence=self._stop,
            doubt=self._doubt,
        )

    def _read(self, choice: WireChoice) -> None:
        named: list[int] = []
        logprobs: list[float] = []
        wire = choice.logprobs
        if wire is not None and wire.content is not None:
            logprobs = logprobs_of(wire.content)
            named = ids_of(wire.content) if choice.token_ids is None else named
        elif wire is not None and wire.token_logprobs is not None:
            logprobs = [number(value) for value in wire.token_logprobs]
            if choice.token_ids is None:
                named = [found for token in wire.tokens or () if (found := id_of_name(token)) is not None]
        ids = named if choice.token_ids is None else choice.token_ids
        if len(ids) < len(logprobs):
            if not ids and not self._seen:
                raise self._no_ids()
            self._doubt = f"{self._endpoint} sent {len(logprobs)} logprobs with {len(ids)} ids: some are lost"
        self._ids += ids
        self._seen += len(ids)
        self._logprobs += logprobs
        if choice.finish_reason is not None:
            self._finish = finish_reason(choice.finish_reason)
            self._stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if choice.weight_versions:
            self._spans = spans_of(choice.weight_versions)

    def _no_ids(self) -> EngineError:
        return EngineError(
            "no_token_ids",
            f"{self._endpoint} returned no `choices[0].token_ids` (and no `token_id:N` logprobs): start vLLM >= "
            "0.10.2, or point the engine's URL past a router that strips it",
        )
