"""What a vLLM (or a server that claims no other name) can do, found by a handful of calls of a few tokens.

Each question is a real call of the kind that will be made later, read by the reader that will read it: a route that
is listed and refuses, or a router that strips ids, shows here. A question that fails in any way is a "no".
"""

from __future__ import annotations

import asyncio

import msgspec

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.contract.completion import LogprobKind
from polar.engines.base import EngineError, EngineInfo, TokenChunk
from polar.engines.capabilities import Capabilities, Shortcoming
from polar.engines.http import Upstream
from polar.engines.openai_sse import EventReader
from polar.engines.questions import CHAT, HOT, PROMPT, SAME, TOKENS, Questions
from polar.engines.sampled import number
from polar.engines.vllm_wire import BODIES, COMPLETIONS, GENERATE, TokensReader

_SENTINEL = 9999.0
_PIXEL = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


async def probe_vllm(upstream: Upstream, info: EngineInfo) -> Capabilities:
    """Ask it everything, once.

    Raises:
        UsageError: it answers, but not within two minutes: it is paused, or far too busy.
    """
    probe = _Probe(upstream, info)
    (generate, completions, chat_ids), (renders, structured, images, caching, updates) = await asyncio.gather(
        asyncio.gather(probe.tokens(GENERATE), probe.tokens(COMPLETIONS), probe.chat_ids()),
        asyncio.gather(probe.renders(), probe.structured(), probe.images(), probe.prefix_caching(), probe.updates()),
    )
    sampled = generate or completions
    found = Capabilities(
        kind=info.kind,
        version=info.version,
        model=info.model,
        context_length=info.context_length,
        token_route=GENERATE if generate else COMPLETIONS if completions else None,
        chat_ids=chat_ids,
        weight_versions=bool(sampled and sampled.weight_spans),
        weight_updates=updates,
        renders=renders,
        logprobs=await probe.logprobs(sampled),
        structured_outputs=structured,
        prefix_caching=caching,
        images=images,
    )
    return msgspec.structs.replace(found, missing=tuple(_shortcomings(found)))


class _Probe(Questions):
    """The questions."""

    async def tokens(self, route: str) -> TokenChunk | None:
        """The whole reply to a few ids by a token route, if that works in every part."""
        body = BODIES[route](
            ids(PROMPT),
            Sampling(temperature=HOT, max_tokens=TOKENS, seed=1),
            stop_ids=frozenset(),
            model=self._info.model,
            room=TOKENS,
        )
        status, reply = await self._ask(route, body)
        if status != 200:
            return None
        reader, events = TokensReader(self._upstream.url + route), EventReader()
        try:
            for payload in [*events.feed(reply), *events.end()]:
                if payload != b"[DONE]":
                    reader.feed(payload)
            chunk = reader.finish()
        except EngineError:
            return None
        return chunk if len(chunk.ids) == len(chunk.logprobs) and chunk.doubt is None else None

    async def logprobs(self, sampled: TokenChunk | None) -> LogprobKind:
        """What logprobs are of: those of a hot sample against those of scoring its tokens, which are the model's
        own whatever the server was told."""
        if sampled is None:
            return "unknown"
        prompt = [*PROMPT, *sampled.ids]
        body = {"model": self._info.model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        told = await self._json(COMPLETIONS, body)
        try:
            scores = told["choices"][0]["prompt_logprobs"][len(PROMPT) :]
            raw = [number(score[str(token)]["logprob"]) for score, token in zip(scores, sampled.ids, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError):
            return "unknown"
        if not all(-_SENTINEL < value <= 1e-3 for value in (*raw, *sampled.logprobs)):  # NaN, too, or logits
            return "unknown"
        off = max(abs(a - b) for a, b in zip(raw, sampled.logprobs, strict=True))
        return "raw" if off < SAME else "processed"

    async def renders(self) -> bool:
        """A chat becomes ids, and ids a message."""
        chat = {"model": self._info.model, "messages": [{"role": "user", "content": "Hi"}]}
        prompt = (await self._json("/v1/chat/completions/render", chat)).get("token_ids")
        if not prompt:
            return False
        choice = {"index": 0, "finish_reason": "stop", "token_ids": prompt[:1], "logprobs": None}
        reply = {"request_id": "polar-probe", "choices": [choice]}
        body = {"model": chat["model"], "generate_response": reply, "prompt_token_ids": prompt, "chat_request": chat}
        return bool((await self._json("/v1/chat/completions/derender", body)).get("choices"))

    async def structured(self) -> bool | None:
        """A choice between two words that no model makes by itself."""
        words = ["polar", "probe"]
        body = {"model": self._info.model, "prompt": list(PROMPT), "max_tokens": 8, "temperature": 0.0}
        told = await self._json(COMPLETIONS, {**body, "structured_outputs": {"choice": words}})
        if not told.get("choices"):
            return None
        return str(told["choices"][0].get("text", "")).strip() in words

    async def images(self) -> bool:
        content = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": _PIXEL}}]
        body = {"model": self._info.model, "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
        return (await self._ask(CHAT, body))[0] == 200

    async def prefix_caching(self) -> bool | None:
        _, metrics = await self._ask("/metrics")
        found = {value: b'enable_prefix_caching="%s"' % str(value).encode() in metrics for value in (True, False)}
        return next((value for value, there in found.items() if there), None)

    async def updates(self) -> bool:
        return (await self._ask("/is_paused"))[0] == 200


def _shortcomings(found: Capabilities) -> list[Shortcoming]:
    """In the order of how much they cost. What is no vLLM has none of vLLM's flags."""
    lines = _vllm_shortcomings(found)
    if found.kind == "vllm":
        return lines
    fix = "serve it with vLLM or SGLang, and give their own address, not that of a proxy"
    return [msgspec.structs.replace(line, fix=fix) for line in lines]


def _vllm_shortcomings(found: Capabilities) -> list[Shortcoming]:
    lines = []
    if found.token_route is None:
        fix = "start vLLM >= 0.10.2 with --enable-scale-out, and point the URL past a router that strips ids"
        lines.append(Shortcoming("token ids in and out (tito mode)", fix))
    if not found.chat_ids:
        fix = "start vLLM >= 0.10.2 (return_token_ids), and point the URL past a router that strips ids"
        lines.append(Shortcoming("token ids of chat completions", fix))
    if not found.weight_versions:
        fix = (
            f"a newer vLLM (0.32 has them) with --enable-scale-out (for {GENERATE}), or POST /admin/inference/version"
        )
        lines.append(Shortcoming("the weight version of each token", fix))
    if not found.weight_updates:
        lines.append(Shortcoming("new weights while it serves", "start vLLM with VLLM_SERVER_DEV_MODE=1"))
    if found.logprobs == "raw":
        fix = "sample at temperature 1, or start vLLM with --logprobs-mode processed_logprobs"
        lines.append(Shortcoming("logprobs of the distribution that is sampled from", fix))
    if found.logprobs == "unknown":
        fix = "start vLLM with --logprobs-mode raw_logprobs or processed_logprobs"
        lines.append(Shortcoming("which distribution its logprobs belong to", fix))
    if not found.renders:
        fix = "start vLLM with --enable-scale-out; needed only without a local tokenizer (--tokenizer)"
        lines.append(Shortcoming("rendering by the engine", fix))
    if found.prefix_caching is False:
        lines.append(Shortcoming("prefix caching", "start vLLM with --enable-prefix-caching"))
    return lines
