"""Why apart: what SGLang is asked for decides what can be recorded. A prompt and a ``Sampling`` become the body of
its native ``/generate`` here: token ids in, and for each sampled id its logprob, always.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.engines.openai_request import schema_of

_NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""What a call leaves open is said, too: else the server's ``--preferred-sampling-params`` would fill it in unseen."""
_EVENTS, _LONGEST_INTERVAL = 64, 32
_MOST_STOPS = 32
"""SGLang takes no more stop strings; our own reader looks for all of them anyway."""


def request_body(
    prompt_ids: Ids,
    sampling: Sampling,
    *,
    rid: str,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    incremental: bool,
    response_format: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON object for POST /generate.

    Args:
        rid: SGLang's name for the call.
        max_new_tokens: at least 1; never left to SGLang, whose default is 128.
        incremental: whether each event of the stream has only what is new.
    """
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": sorted(stop_ids),
        # The ids are wanted as they were sampled, with the one that ended the reply.
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        settings[name] = neutral if value is None else value
    settings["top_k"] = sampling.top_k if sampling.top_k is not None and sampling.top_k > 0 else -1
    if sampling.seed is not None:
        settings["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        settings["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop:
        settings["stop"] = [word for word in sampling.stop if word][:_MOST_STOPS]
    if response_format is not None:
        settings["json_schema"] = orjson.dumps(schema_of(response_format)).decode()
    if not incremental:
        settings["stream_interval"] = _interval(max_new_tokens)
    return {
        "rid": rid,
        "input_ids": np.ascontiguousarray(prompt_ids),
        "sampling_params": settings,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
    }


def _interval(max_new_tokens: int) -> int:
    """Tokens between two events. Where every event repeats the reply so far, one a token would make a reply of
    32,000 tokens into gigabytes."""
    return min(max(1, max_new_tokens // _EVENTS), _LONGEST_INTERVAL)
