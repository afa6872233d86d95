"""Why: the ids an engine sampled stand in its reply in half a dozen places, by engine, version and flag. Here
a reply (streamed or whole) becomes ``ChatChunk``s; every id, logprob and finish reason is passed on as it
came, and nothing is ever made up from text.

Ids, logprobs or weights in no known form do not take the text from whoever waits for it: the reply is passed on, with
its ``doubt``.

Where ids are looked for, per chunk: ``choices[0].token_ids``, ``choices[0].response_token_ids``, tokens of the
form ``token_id:N`` in the logprobs; and for the whole reply ``sglext.output_ids``. A chunk without text may
carry ids, and a chunk may carry none or several.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
import numpy as np

from polar.contract.arrays import NO_IDS, Ids
from polar.contract.chat import FinishReason, Message, Usage
from polar.contract.completion import WeightSpan
from polar.engines.base import ChatChunk, EngineError
from polar.engines.openai_deltas import DeltaReader, WireDelta
from polar.engines.openai_errors import error_of_event
from polar.engines.openai_prompts import PromptTexts
from polar.engines.sampled import (
    Id,
    WireLogprob,
    WireSpan,
    WireUsage,
    decode,
    finish_reason,
    ids_of,
    logprobs_of,
    spans_of,
)

_NOTHING = msgspec.Raw(b"null")
_PROMPT_KEY = b'"prompt_token_ids":['
"""Unescaped quotes: this is a key wherever it stands, never a piece of text."""
_CUT = msgspec.Raw(b'"%s"' % secrets.token_hex(16).encode())
"""Stands for prompt ids that were read already."""


class WireLogprobs(msgspec.Struct):
    content: list[WireLogprob] | None = None


class WireWeights(msgspec.Struct):
    """Where an engine names the weights it sampled under: spans of the reply, or one name for all of it."""

    weight_version: str | int | None = None
    weight_versions: list[WireSpan] | None = None


class WireText(msgspec.Struct):
    """What a client sees of a choice."""

    index: int = 0
    delta: WireDelta | None = None
    message: WireDelta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    matched_stop: Any = None


class WireChoice(WireText):
    logprobs: WireLogprobs | None = None
    token_ids: list[Id] | None = None
    response_token_ids: list[Id] | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    weight_versions: list[WireSpan] | None = None
    meta_info: WireWeights | None = None


class WireExtension(msgspec.Struct):
    """SGLang's ``sglext``."""

    input_ids: msgspec.Raw = _NOTHING
    output_ids: list[list[Id]] | None = None


class WireReply(msgspec.Struct):
    """A chat completion, or one chunk of it. Prompt ids stay raw JSON until we know that we want them."""

    choices: list[WireChoice] = []
    prompt_token_ids: msgspec.Raw = _NOTHING
    usage: WireUsage | None = None
    sglext: WireExtension | None = None
    metadata: WireWeights | None = None
    error: Any = None


class WireWords(msgspec.Struct):
    """A reply without the fields that only a record needs."""

    choices: list[WireText] = []
    error: Any = None


_decoder = msgspec.json.Decoder(WireReply)
_words = msgspec.json.Decoder(WireWords)
_id_list = msgspec.json.Decoder(list[Id])


class ReplyReader:
    """Reads one reply. ``feed`` takes JSON payloads, ``take`` gives what is new, ``finish`` the last chunk.

    Args:
        expected: ids with which the prompt probably begins (int32). Where it does, they are not read again.
        prompts: what engines wrote before; ``session``: whose call this is.
    """

    def __init__(
        self,
        url: str,
        *,
        require_token_ids: bool,
        expected: Ids = NO_IDS,
        prompts: PromptTexts | None = None,
        session: str = "",
    ) -> None:
        self._url = url
        self._require = require_token_ids
        self._expected = expected
        self._prompts = prompts or PromptTexts()
        self._session = session
        self._deltas = DeltaReader()
        self._prompt: Ids | None = None
        self._prompt_given = False
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._ids_seen = 0
        self._logprobs_seen = 0
        self._usage: WireUsage | None = None
        self._finish: str | None = None
        self._stop: str | None = None
        self._version: str | None = None
        self._spans: list[WeightSpan] = []
        self._doubt: str | None = None

    def feed(self, payload: bytes) -> None:
        """One JSON object: a chunk of a stream, or a whole reply.

        Raises:
            EngineError: it is an error, or no chat completion.
        """
        reply = self._decode_known(payload) or self._decode(payload)
        if reply.error is not None:
            raise error_of_event(reply.error, self._url)
        for choice in reply.choices:
            if choice.index == 0:
                self._read_choice(choice)
        self._read_prompt(reply.prompt_token_ids)
        if reply.usage is not None:
            self._usage = reply.usage
        if reply.metadata is not None:
            self._read_weights(reply.metadata)
        if reply.sglext is not None:
            self._read_extension(reply.sglext)

    def take(self) -> ChatChunk | None:
        """What has come since the last ``take``, or ``None``."""
        deltas = self._deltas.take()
        ids, self._ids = self._ids, []
        logprobs, self._logprobs = self._logprobs, []
        prompt = None if self._prompt_given else self._prompt
        if not (deltas or ids or logprobs or prompt is not None):
            return None
        self._prompt_given = self._prompt is not None
        return ChatChunk(deltas=deltas, ids=ids, logprobs=logprobs, prompt_ids=prompt)

    def finish(self) -> ChatChunk:
        """The last chunk: what is new, the whole message, the finish reason and the usage.

        Raises:
            EngineError: ``unavailable`` if no finish reason came, ``no_token_ids`` if ids are missing.
        """
        if self._finish is None:
            raise EngineError("unavailable", f"{self._url}: the reply ended without a finish reason")
        message = self._deltas.message()
        finish = finish_reason(self._finish)
        if finish == "stop" and message.tool_calls:
            finish = "tool_calls"
        self._check_ids(message, finish)
        rest = self.take() or ChatChunk()
        return ChatChunk(
            deltas=rest.deltas,
            ids=rest.ids,
            logprobs=rest.logprobs,
            prompt_ids=rest.prompt_ids,
            message=message,
            finish_reason=finish,
            stop_sequence=self._stop,
            usage=self._counts(),
            weight_spans=self._weight_spans(),
            doubt=self._doubt,
        )

    def _decode_known(self, payload: bytes) -> WireReply | None:
        """The payload, where its prompt ids begin with the expected ones and go on with others: a comparison of
        bytes instead of reading a quarter of a megabyte of digits. ``None``: read it in full."""
        start = payload.find(_PROMPT_KEY) + len(_PROMPT_KEY) - 1
        if start < len(_PROMPT_KEY) or not len(self._expected) or self._prompt is not None:
            return None
        said, then = self._prompts.beginning(self._session, self._expected)
        follows = start + len(said) + len(then)
        if not (payload.startswith(said, start) and payload.startswith(then, start + len(said))):
            return None
        end = payload.find(b"]", start)
        try:
            new = _id_list.decode(b"[" + payload[follows : end + 1])
            reply = _decoder.decode(payload[:start] + bytes(_CUT) + payload[end + 1 :])
        except msgspec.DecodeError:
            return None
        if reply.prompt_token_ids != _CUT:
            return None  # not the prompt's: a field of that name somewhere else
        self._prompt = np.concatenate([self._expected, np.array(new, dtype=np.int32)])
        self._prompts.keep(self._session, self._prompt, payload[start:end])
        return reply

    def _decode(self, payload: bytes) -> WireReply:
        """The payload; only what a client sees of it where ids, logprobs or weights are in no known form: then the
        reply is served, and in doubt."""
        try:
            return decode(payload, _decoder, self._url, "chat completion")
        except EngineError as error:
            try:
                words = decode(payload, _words, self._url, "chat completion")
            except EngineError:
                raise error from None
            self._doubt = self._doubt or str(error)
        choices = [WireChoice(**msgspec.structs.asdict(choice)) for choice in words.choices]
        return WireReply(choices=choices, error=words.error)

    def _read_prompt(self, raw: msgspec.Raw) -> None:
        if self._prompt is not None or raw == _NOTHING:
            return
        try:
            self._prompt = _prompt_ids(raw)
            self._prompts.keep(self._session, self._prompt, bytes(raw)[:-1])
        except msgspec.DecodeError as error:
            self._doubt = self._doubt or f"{self._url} sent prompt ids in no known form: {error}"

    def _read_choice(self, choice: WireChoice) -> None:
        delta = choice.delta or choice.message
        if delta is not None:
            self._deltas.feed(delta)
        entries = (choice.logprobs and choice.logprobs.content) or ()
        logprobs = logprobs_of(entries)
        ids = choice.token_ids
        if ids is None:
            ids = choice.response_token_ids
        if ids is None:
            ids = ids_of(entries)
        self._ids += ids
        self._ids_seen += len(ids)
        self._logprobs += logprobs
        self._logprobs_seen += len(logprobs)
        self._read_prompt(choice.prompt_token_ids)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            stop = choice.stop_reason if choice.stop_reason is not None else choice.matched_stop
            self._stop = stop if isinstance(stop, str) else None
        self._read_spans(choice.weight_versions)
        if choice.meta_info is not None:
            self._read_weights(choice.meta_info)

    def _read_extension(self, extension: WireExtension) -> None:
        self._read_prompt(extension.input_ids)
        if extension.output_ids and not self._ids_seen:
            self._ids += extension.output_ids[0]
            self._ids_seen += len(extension.output_ids[0])

    def _read_weights(self, weights: WireWeights) -> None:
        if weights.weight_version not in (None, ""):
            self._version = str(weights.weight_version)
        self._read_spans(weights.weight_versions)

    def _read_spans(self, spans: list[WireSpan] | None) -> None:
        if spans:
            self._spans = spans_of(spans)

    def _weight_spans(self) -> list[WeightSpan]:
        if not self._spans and self._version is not None:
            return [WeightSpan(self._version, 0, self._ids_seen)]
        return self._spans

    def _counts(self) -> Usage | None:
        """The engine's own counts, where it sends both. Its ids are no count: those that are lost are not in it."""
        usage = self._usage
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            return None
        return usage.counts()

    def _check_ids(self, message: Message, finish: FinishReason) -> None:
        if not self._require or finish == "abort" or self._doubt is not None:
            return
        sampled = self._usage.completion_tokens if self._usage is not None else 0
        if not self._ids_seen and (sampled or self._logprobs_seen or message != Message(role="assistant")):
            field = "`choices[0].token_ids` (and no `token_id:N` logprobs)"
        elif self._prompt is None:
            field = "`prompt_token_ids`"
        else:
            return
        raise EngineError(
            "no_token_ids",
            f"{self._url} returned no {field}: start vLLM >= 0.10.2 or an SGLang with `sglext`, point "
            "the engine's URL past a router that strips it",
        )


def _prompt_ids(raw: msgspec.Raw) -> Ids:
    """Ids of a JSON list (int32). 40,000 of them are a quarter of a megabyte on each call, so numpy reads the
    digits itself, in half the time that a Python list on the way would take."""
    text = bytes(raw)
    inner = text[1:-1]
    if inner and not inner.translate(None, b"0123456789, "):
        found = np.fromstring(inner, dtype=np.int64, sep=",")
        if len(found) == inner.count(b",") + 1 and found.max() < 2**31:
            return found.astype(np.int32)
    return np.array(_id_list.decode(text), dtype=np.int32)
