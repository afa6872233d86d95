"""Whether a reply may be trained: ids, logprobs, usage and finish reason must agree with each other.

Engines lose ids in streaming tool parsers, return null logprobs, sentinels and wrong counts. Such a reply
still serves the harness; training on it would poison the run silently. So every reply is judged once, when it
is captured, and carries the reason from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polar.contract.arrays import Floats, Ids
from polar.contract.chat import FinishReason, Message, Usage
from polar.contract.completion import Outcome

SENTINEL = -9999.0
"""What vLLM reports for a logprob that it could not represent."""


def judge(
    *,
    message: Message,
    prompt_ids: Ids,
    response_ids: Ids,
    logprobs: Floats,
    finish_reason: FinishReason,
    usage: Usage | None,
    limit: int | None = None,
    doubt: str | None = None,
) -> tuple[Outcome, str | None]:
    """How a call ended, and one line of detail where it may not be trained.

    Args:
        usage: the engine's own counts, where it reports any.
        limit: how many ids the reply could have had, where that is known exactly.
        doubt: why the ids are not just those that were sampled, where whoever read them found that.
    """
    said_something = bool(message.content or message.reasoning or message.tool_calls)
    counted = usage.completion_tokens if usage else 0
    if finish_reason == "abort":
        return "aborted", "the engine ended the generation before it was whole"
    if doubt is not None:
        return "token_mismatch", doubt
    if not len(response_ids) and (said_something or counted):
        return "no_token_ids", "the engine returned a reply without the ids it sampled"
    if not len(prompt_ids):
        return "no_token_ids", "the engine did not return the ids of the prompt"
    if not len(response_ids):
        return "empty", "nothing was sampled"
    if usage is not None and counted != len(response_ids):
        return "token_mismatch", f"{len(response_ids)} ids returned, but usage counts {counted}"
    if usage is not None and usage.prompt_tokens != len(prompt_ids):
        return "token_mismatch", f"{len(prompt_ids)} prompt ids, but usage counts {usage.prompt_tokens}"
    if limit is not None and (len(response_ids) > limit or (finish_reason == "length" and len(response_ids) < limit)):
        return "token_mismatch", f"{len(response_ids)} ids, finish reason {finish_reason}, but a limit of {limit}"
    if min(int(response_ids.min()), int(prompt_ids.min())) < 0:
        return "token_mismatch", "a negative token id"
    return _judge_logprobs(response_ids, logprobs)


def doubt_end(
    last: int | None, stop_ids: frozenset[int], *, stop_sequence: str | None, asked: Sequence[str]
) -> str | None:
    """What is wrong with the end of a reply of which an engine, which is known to tell the id that ends one, says
    that the model ended it; ``None``: nothing.

    Args:
        last: its last id, if it has any.
        stop_sequence: the stop string at which the engine says that it ended.
        asked: the stop strings that it was to look for.
    """
    if stop_sequence is not None and stop_sequence not in asked:
        return f"the engine ended the reply at {stop_sequence!r}, which is no stop string of the call"
    if stop_sequence is None and last is not None and last not in stop_ids:
        return (
            f"the model ended the reply, but its last id {last} ends none: ids are lost, or the tokenizer's folder "
            "lacks the model's generation_config.json"
        )
    return None


def _judge_logprobs(response_ids: Ids, logprobs: Floats) -> tuple[Outcome, str | None]:
    if len(logprobs) != len(response_ids):
        return "logprob_missing", f"{len(response_ids)} ids, but {len(logprobs)} logprobs"
    bad = ~np.isfinite(logprobs) | (logprobs <= SENTINEL) | (logprobs > 1e-3)
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        return "logprob_missing", f"the logprob of response token {where} is {float(logprobs[where])}"
    return "ok", None
