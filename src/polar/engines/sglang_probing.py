"""What an SGLang server can do, found by a handful of calls of a few tokens.

As with vLLM each question is a real call of the kind that will be made later, read by the reader that will read it;
what only flags tell is taken from ``/server_info``. A question that fails in any way is a "no".
"""

from __future__ import annotations

import asyncio
import math
import uuid

import msgspec

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.contract.completion import LogprobKind
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from polar.engines.capabilities import Capabilities, Shortcoming
from polar.engines.http import Upstream
from polar.engines.openai_sse import EventReader
from polar.engines.questions import HOT, PROMPT, SAME, TOKENS, Questions
from polar.engines.sampled import number
from polar.engines.sglang_reply import ROUTE, GenerateReader
from polar.engines.sglang_request import request_body
from polar.engines.sglang_server import ask_server


async def probe_sglang(upstream: Upstream, info: EngineInfo) -> Capabilities:
    """Ask it everything, once.

    Raises:
        UsageError: it is no SGLang server, or it does not answer within two minutes: it is paused, or far too busy.
    """
    server = await ask_server(upstream, info.model)
    probe = _Probe(upstream, info)
    sampled, chat_ids, structured, updates = await asyncio.gather(
        probe.tokens(), probe.chat_ids(), probe.structured(), probe.updates()
    )
    found = Capabilities(
        kind="sglang",
        version=server.version,
        model=info.model,
        context_length=info.context_length,
        token_route=ROUTE if sampled else None,
        chat_ids=chat_ids,
        weight_versions=bool(sampled and sampled.weight_spans),
        weight_updates=updates,
        renders=False,
        logprobs=await probe.logprobs(sampled),
        structured_outputs=structured,
        prefix_caching=server.prefix_caching,
        images=server.images,
    )
    return msgspec.structs.replace(found, missing=tuple(_shortcomings(found)))


class _Probe(Questions):
    """The questions. The names of its calls end in ``polar-probe``, too, where they are not in a header."""

    async def tokens(self) -> TokenChunk | None:
        """The reply to a few ids in one event, if it works in every part."""
        body = request_body(
            ids(PROMPT),
            Sampling(temperature=HOT),
            rid=f"{uuid.uuid4().hex}-polar-probe",
            stop_ids=frozenset(),
            max_new_tokens=TOKENS,
            incremental=True,
        )
        body["sampling_params"] |= {"ignore_eos": True, "stream_interval": TOKENS}
        status, reply = await self._ask(ROUTE, body)
        reader, events, chunks = GenerateReader(self._upstream.url + ROUTE, len(PROMPT)), EventReader(), []
        try:
            for payload in [*events.feed(reply), *events.end()]:
                if payload != b"[DONE]" and (chunk := reader.feed(payload)) is not None:
                    chunks.append(chunk)
            reader.end()
        except EngineError:
            return None
        if status != 200 or chunks[-1].doubt is not None:
            return None
        sampled = [token for chunk in chunks for token in chunk.ids]
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        return TokenChunk(sampled, logprobs, weight_spans=chunks[-1].weight_spans)

    async def logprobs(self, sampled: TokenChunk | None) -> LogprobKind:
        """What logprobs are of: those of a hot sample against those of scoring its tokens, which are the model's
        own."""
        if sampled is None or not all(map(math.isfinite, sampled.logprobs)):
            return "unknown"
        body = {
            "input_ids": [*PROMPT, *sampled.ids],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        try:
            pairs = (await self._json(ROUTE, body))["meta_info"]["input_token_logprobs"][len(PROMPT) :]
            raw = [number(logprob) for logprob, *_ in pairs]
            off = max(abs(a - b) for a, b in zip(raw, sampled.logprobs, strict=True))
        except (KeyError, TypeError, ValueError):
            return "unknown"
        if not math.isfinite(off):
            return "unknown"
        return "raw" if off < SAME else "temperature"

    async def structured(self) -> bool:
        """A choice between two words that no model makes by itself."""
        settings = {"max_new_tokens": 8, "temperature": 0.0, "regex": "(polar|probe)"}
        told = await self._json(ROUTE, {"input_ids": list(PROMPT), "sampling_params": settings})
        return str(told.get("text", "")).strip() in ("polar", "probe")

    async def updates(self) -> bool:
        """Its routes of administration take our key: one that aborts a call which is not there."""
        status, _ = await self._ask("/abort_request", {"rid": f"{uuid.uuid4().hex}-polar-probe"})
        return status == 200


def _shortcomings(found: Capabilities) -> list[Shortcoming]:
    """In the order of how much they cost."""
    lines = []
    if found.token_route is None:
        fix = "start a newer SGLang (0.5.23 has it), and point the URL past a router that strips ids"
        lines.append(Shortcoming("token ids in and out (tito mode)", fix))
    if not found.chat_ids:
        fix = "start a newer SGLang (0.5.23 has it); tito mode does not need them"
        lines.append(Shortcoming("token ids of chat completions", fix))
    if not found.weight_versions:
        lines.append(Shortcoming("the weight version of each token", "start a newer SGLang (0.5.23 has it)"))
    if not found.weight_updates:
        fix = "give the server's --admin-api-key as POLAR_ENGINE_API_KEY"
        lines.append(Shortcoming("new weights while it serves", fix))
    if found.logprobs == "raw":
        fix = "sample at temperature 1, or start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
        lines.append(Shortcoming("logprobs of the distribution that is sampled from", fix))
    if found.logprobs == "unknown":
        lines.append(Shortcoming("which distribution its logprobs belong to", "start a newer SGLang"))
    if found.prefix_caching is False:
        lines.append(Shortcoming("prefix caching", "start SGLang without --disable-radix-cache"))
    return lines
