"""Why: SGLang's stream repeats itself. Each event has the whole reply so far, or with
``--incremental-streaming-output`` only what is new, and one event may bring any number of tokens. What is new is
found by counting, in either kind; nothing is ever counted twice or made up.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from polar.contract.chat import FinishReason, Usage
from polar.engines.base import EngineError, TokenChunk
from polar.engines.openai_errors import error_of_event
from polar.engines.sampled import Id, WireSpan, decode, finish_reason, number, spans_of


class WirePair(msgspec.Struct, array_like=True):
    """An entry of ``output_token_logprobs``: ``[logprob, id, text]``. The logprob is ``Any``: null or a boolean
    must not end the call."""

    logprob: Any
    token_id: Id


class WireMeta(msgspec.Struct):
    """``meta_info``. Counts are of the whole reply so far, in either kind of stream."""

    finish_reason: Any = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[WirePair] | None = None
    weight_version: Any = None
    weight_versions: list[WireSpan] | None = None


class WireEvent(msgspec.Struct):
    output_ids: list[Id] | None = None
    meta_info: WireMeta | None = None
    error: Any = None


ROUTE = "/generate"
_decoder = msgspec.json.Decoder(WireEvent)


class GenerateReader:
    """Reads one reply of POST /generate.

    Args:
        prompt_tokens: how many ids were sent.
    """

    def __init__(self, url: str, prompt_tokens: int) -> None:
        self.finished = False
        self._url = url
        self._prompt_tokens = prompt_tokens
        self._seen = 0
        """Tokens that the events so far have brought the reply to, by its own count."""
        self._given = 0
        """Their ids: fewer, where some are lost."""
        self._doubt: str | None = None

    def feed(self, payload: bytes) -> TokenChunk | None:
        """What an event brings, if anything.

        Raises:
            EngineError: it is an error or no reply; ``no_token_ids``: it has no ids, or the whole reply had none.
        """
        event = decode(payload, _decoder, self._url, "reply of SGLang")
        if event.error is not None:
            raise error_of_event(event.error, self._url)
        meta = event.meta_info
        if meta is None:
            raise self._missing("meta_info")
        reason = self._reason(meta)
        self._check_prompt(meta)
        ids, logprobs = self._new(event.output_ids, meta)
        self._given += len(ids)
        if reason is None and not ids:
            return None
        if reason not in (None, "abort") and self._seen and not self._given:
            raise self._missing("output_ids")
        self.finished = reason is not None
        return TokenChunk(
            ids,
            logprobs,
            weight_version=None if meta.weight_version is None else str(meta.weight_version),
            finish_reason=reason,
            cached_tokens=meta.cached_tokens or 0,
            weight_spans=spans_of(meta.weight_versions) if self.finished else (),
            usage=self._usage(meta) if self.finished else None,
            stop_sequence=_stop_string(meta) if self.finished else None,
            doubt=self._doubt,
        )

    def end(self) -> None:
        """The stream is over.

        Raises:
            EngineError: ``unavailable``: the reply is not.
        """
        if not self.finished:
            raise EngineError("unavailable", f"{self._url}: the reply ended without a finish reason")

    def _check_prompt(self, meta: WireMeta) -> None:
        """A server with ``--allow-auto-truncate`` samples behind a part of the prompt, and says so only here."""
        if meta.prompt_tokens not in (None, self._prompt_tokens):
            raise EngineError(
                "bad_request",
                f"{self._url} was sent {self._prompt_tokens} prompt ids and used {meta.prompt_tokens}: start SGLang "
                "without --allow-auto-truncate",
            )

    def _reason(self, meta: WireMeta) -> FinishReason | None:
        """Why the reply ended, if it did.

        Raises:
            EngineError: the engine gave up on the call, and says so with a status.
        """
        reason = meta.finish_reason
        if reason is None:
            return None
        if not isinstance(reason, dict):
            return finish_reason(str(reason))
        if reason.get("type") == "abort" and isinstance(reason.get("status_code"), int):
            raise error_of_event({"message": reason.get("message"), "code": reason["status_code"]}, self._url)
        return finish_reason(str(reason.get("type")))

    def _new(self, ids: list[int] | None, meta: WireMeta) -> tuple[list[int], list[float]]:
        """The ids that have not been seen before, and their logprobs (NaN where there is none). Of a reply with fewer
        ids than it counts, or more, those that are there: it is served, and in doubt."""
        pairs = meta.output_token_logprobs or []
        if ids is None:
            if not pairs and meta.completion_tokens:
                raise self._missing("output_ids")
            ids = [pair.token_id for pair in pairs]
        count = meta.completion_tokens
        if count is None:
            raise self._missing("meta_info.completion_tokens")
        first = count - len(ids)
        """The place in the reply of ``ids[0]``: 0 where each event repeats the reply."""
        if not 0 <= first <= self._seen:
            self._doubt = (
                f"{self._url} counts {count} tokens, and of these sent {self._given} earlier and {len(ids)} now"
            )
        known = self._given if first < 0 else max(0, self._seen - first)
        new = ids[known:]
        self._seen = max(self._seen, count)
        if len(pairs) not in (len(ids), count):
            return new, [math.nan] * len(new)
        pairs = pairs[len(pairs) - len(new) :] if new else []
        return new, [
            number(pair.logprob) if pair.token_id == token else math.nan
            for token, pair in zip(new, pairs, strict=True)
        ]

    def _usage(self, meta: WireMeta) -> Usage:
        return Usage(meta.prompt_tokens or self._prompt_tokens, meta.completion_tokens or 0, meta.cached_tokens or 0)

    def _missing(self, field: str) -> EngineError:
        return EngineError(
            "no_token_ids",
            f"{self._url} returned no `{field}`: give the address of SGLang itself with --engine-url, not of a "
            "router that strips it",
        )


def _stop_string(meta: WireMeta) -> str | None:
    matched = meta.finish_reason.get("matched") if isinstance(meta.finish_reason, dict) else None
    return matched if isinstance(matched, str) else None
