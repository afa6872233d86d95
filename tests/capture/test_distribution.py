"""Which distribution a call's logprobs are of, and when that is a trap."""

from __future__ import annotations

from typing import Any

import pytest

from polar.capture.distribution import distribution
from polar.contract.chat import Sampling
from polar.contract.completion import LogprobKind


@pytest.mark.parametrize(
    ("kind", "sampling", "of", "words"),
    [
        ("raw", {}, "sampling", None),
        ("raw", {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}, "sampling", None),
        ("raw", {"repetition_penalty": 1.0, "presence_penalty": 0.0}, "sampling", None),
        ("raw", {"temperature": 0.7}, "raw", "temperature 0.7"),
        ("raw", {"top_p": 0.9, "top_k": 20}, "raw", "before top_p 0.9, top_k 20"),
        ("temperature", {"temperature": 0.7}, "sampling", None),
        ("temperature", {"temperature": 0.7, "top_p": 0.9}, "temperature", "before top_p 0.9:"),
        ("temperature", {"min_p": 0.1}, "temperature", "min_p 0.1"),
        ("temperature", {"frequency_penalty": 0.5}, "temperature", "frequency_penalty 0.5"),
        ("temperature", {"logit_bias": {7: 1.0}}, "temperature", "logit_bias"),
        ("processed", {"temperature": 0.7, "top_p": 0.9}, "sampling", None),
        ("unknown", {}, "sampling", None),
        ("unknown", {"temperature": 0.7}, "unknown", "does not say"),
        ("raw", {"temperature": 0.0}, "raw", "greedy"),
        ("processed", {"temperature": 0.0}, "unknown", "greedy"),
    ],
)
def test_what_the_logprobs_are_of(kind: LogprobKind, sampling: dict[str, Any], of: str, words: str | None) -> None:
    found, line = distribution(kind, Sampling(**sampling))
    assert found == of
    assert (line is None) is (words is None)
    assert words is None or words in str(line)


@pytest.mark.parametrize("kind", ["raw", "temperature", "processed", "unknown"])
def test_a_grammars_mask_is_in_all_logprobs(kind: LogprobKind) -> None:
    found, line = distribution(kind, Sampling(), constrained=True)
    assert found == "masked"
    assert "grammar" in str(line)


def test_what_is_left_to_an_engine_with_defaults_of_its_own_is_unknown() -> None:
    asked = Sampling(temperature=1.0)
    assert distribution("raw", asked, engine_defaults=True)[0] == "unknown"
    assert str(distribution("raw", asked, engine_defaults=True)[1]).startswith("top_p, top_k are left")
    assert distribution("processed", asked, engine_defaults=True) == ("sampling", None)
    pinned = Sampling(temperature=1.0, top_p=1.0, top_k=-1)
    assert distribution("raw", pinned, engine_defaults=True) == ("sampling", None)
