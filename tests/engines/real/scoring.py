"""What a real server itself says of ids that were sampled before: the logprob of each, from its weights as they are
now."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import numpy as np

from polar.contract.result import Trace
from polar.engines.vllm_wire import COMPLETIONS

CLOSE = 1e-3
"""Nats between a token's logprob as it was sampled and as it is scored later, in float32."""


async def response_scores(url: str, kind: str, trace: Trace) -> np.ndarray[Any, Any]:
    """Those of a trace's response."""
    tokens = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
    found = await asyncio.to_thread({"vllm": by_vllm, "sglang": by_sglang}[kind], url, tokens)
    return np.array(found[len(trace.prompt_ids) :], dtype=np.float64)


def by_vllm(url: str, tokens: list[int]) -> list[float | None]:
    """Of each id; of the first there is none."""
    body = {"model": "smollm2", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    told = ask(url, COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    return [None, *(score[str(token)]["logprob"] for score, token in zip(told[1:], tokens[1:], strict=True))]


def by_sglang(url: str, tokens: list[int]) -> list[float | None]:
    """Of each id, at temperature 1; of the first there is none."""
    settings = {"max_new_tokens": 1, "temperature": 1.0}
    body = {"input_ids": tokens, "sampling_params": settings, "return_logprob": True, "logprob_start_len": 0}
    return [pair[0] for pair in ask(url, "/generate", body)["meta_info"]["input_token_logprobs"]]


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The server's answer; a POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read() or b"null")
