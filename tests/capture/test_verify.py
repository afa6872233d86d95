"""Whether a reply may be trained: its ids, logprobs, counts and finish reason must agree."""

from __future__ import annotations

from typing import Any

import pytest

from polar.capture.verify import doubt_end, judge
from polar.contract.arrays import NO_FLOATS, NO_IDS, floats, ids
from polar.contract.chat import Message, ToolCall, Usage

GOOD: dict[str, Any] = {
    "message": Message("assistant", "hi"),
    "prompt_ids": ids([1, 2]),
    "response_ids": ids([3, 4]),
    "logprobs": floats([-0.1, 0.0]),
    "finish_reason": "stop",
    "usage": Usage(2, 2),
}
SILENT = {"response_ids": NO_IDS, "logprobs": NO_FLOATS, "usage": None}


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "ok"),
        ({"usage": None}, "ok"),
        ({"finish_reason": "length"}, "ok"),
        ({"logprobs": floats([-50.0, 5e-4])}, "ok"),
        ({**SILENT}, "no_token_ids"),
        ({**SILENT, "message": Message("assistant", reasoning="hm")}, "no_token_ids"),
        ({**SILENT, "message": Message("assistant", tool_calls=(ToolCall("i", "f", ""),))}, "no_token_ids"),
        ({**SILENT, "message": Message("assistant"), "usage": Usage(2, 5)}, "no_token_ids"),
        ({**SILENT, "message": Message("assistant")}, "empty"),
        ({"prompt_ids": NO_IDS, "usage": None}, "no_token_ids"),
        ({"finish_reason": "abort"}, "aborted"),
        ({**SILENT, "finish_reason": "abort"}, "aborted"),
        ({"doubt": "an id is null"}, "token_mismatch"),
        ({"doubt": "an id is null", **SILENT}, "token_mismatch"),
        ({"doubt": "an id is null", "finish_reason": "abort"}, "aborted"),
        ({"limit": 2}, "ok"),
        ({"limit": 2, "finish_reason": "length"}, "ok"),
        ({"limit": 3, "finish_reason": "length"}, "token_mismatch"),
        ({"limit": 1}, "token_mismatch"),
        ({"usage": Usage(2, 3)}, "token_mismatch"),
        ({"usage": Usage(3, 2)}, "token_mismatch"),
        ({"response_ids": ids([3, -1])}, "token_mismatch"),
        ({"prompt_ids": ids([-1, 2])}, "token_mismatch"),
        ({"logprobs": floats([-0.1])}, "logprob_missing"),
        ({"logprobs": NO_FLOATS}, "logprob_missing"),
        ({"logprobs": floats([-0.1, float("nan")])}, "logprob_missing"),
        ({"logprobs": floats([float("inf"), -0.1])}, "logprob_missing"),
        ({"logprobs": floats([float("-inf"), -0.1])}, "logprob_missing"),
        ({"logprobs": floats([-0.1, -9999.0])}, "logprob_missing"),
        ({"logprobs": floats([-0.1, 1.0])}, "logprob_missing"),
    ],
)
def test_how_a_call_ended(change: dict[str, Any], outcome: str) -> None:
    judged, detail = judge(**{**GOOD, **change})
    assert judged == outcome
    assert (detail is None) is (outcome == "ok")


@pytest.mark.parametrize(
    ("last", "stop_sequence", "words"),
    [
        (2, None, None),
        (None, None, None),
        (7, "END", None),
        (7, None, "its last id 7 ends none"),
        (2, "NaN happened", "'NaN happened', which is no stop string of the call"),
    ],
)
def test_a_reply_that_the_model_ended_has_the_id_that_ends_it(
    last: int | None, stop_sequence: str | None, words: str | None
) -> None:
    doubt = doubt_end(last, frozenset({2}), stop_sequence=stop_sequence, asked=("END",))
    assert (doubt is None) if words is None else (words in str(doubt))


def test_the_detail_names_the_token() -> None:
    _, detail = judge(**{**GOOD, "logprobs": floats([-0.1, -9999.0])})
    assert detail == "the logprob of response token 1 is -9999.0"
