"""What the sampling options do to the next token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polar.contract.arrays import NO_IDS, ids
from polar.contract.chat import Sampling
from polar.engines.base import EngineError
from polar.engines.local.sampler import Sampler, check_sampling, sample

LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.5, 0.0])


def tokens(count: int, prompt: Any = NO_IDS, logits: torch.Tensor = LOGITS, **options: Any) -> list[int]:
    """``count`` tokens of one call from the same logits."""
    sampler = Sampler(Sampling(**{"seed": 1, **options}), prompt, len(logits))
    return [sample(logits[None], [sampler])[0][0] for _ in range(count)]


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": 0.0}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 2}, {0, 3}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_k": -1, "top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.6}, {0, 3}),
        ({"min_p": 0.5}, {0, 3}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"logit_bias": {0: -100.0, 3: -100.0}}, {1, 2, 4}),
        ({"logit_bias": {2: 100.0}}, {2}),
        ({"temperature": 0.0, "logit_bias": {0: -100.0}}, {3}),
    ],
)
def test_only_the_tokens_that_an_option_leaves_are_drawn(options: dict[str, Any], allowed: set[int]) -> None:
    assert set(tokens(400, **options)) == allowed


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9999999}])
def test_tokens_come_as_often_as_their_probability_says(temperature: float, options: dict[str, Any]) -> None:
    drawn = torch.tensor(tokens(6000, temperature=temperature, **options)).bincount(minlength=5) / 6000
    assert drawn.tolist() == pytest.approx((LOGITS / temperature).softmax(-1).tolist(), abs=0.03)


def test_a_top_p_that_needs_more_than_the_first_candidates_gets_them() -> None:
    flat = torch.zeros(5000)
    drawn = tokens(2000, logits=flat, top_p=0.9)
    assert len(set(drawn)) > 1200


def test_a_seed_repeats_and_another_does_not() -> None:
    assert tokens(50, seed=3) == tokens(50, seed=3)
    assert tokens(50, seed=3) != tokens(50, seed=4)
    assert tokens(50, seed=None) != tokens(50, seed=None)


def test_penalties_push_greedy_choices_away_from_what_was_said() -> None:
    assert tokens(5, temperature=0.0, presence_penalty=2.0) == [0, 3, 1, 0, 0]
    assert sorted(tokens(5, temperature=0.0, frequency_penalty=100.0)) == [0, 1, 2, 3, 4]
    assert tokens(2, temperature=0.0, repetition_penalty=3.0) == [0, 3]


def test_only_the_repetition_penalty_looks_at_the_prompt() -> None:
    assert tokens(1, ids([0]), temperature=0.0, repetition_penalty=3.0) == [3]
    assert tokens(1, ids([0]), temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0) == [0]


def test_the_logprob_is_that_of_the_temperature_and_greedy_reports_temperature_1() -> None:
    for temperature, of in ((0.0, 1.0), (0.5, 0.5), (None, 1.0)):
        sampler = Sampler(Sampling(temperature=temperature, seed=0), NO_IDS, 5)
        (token,), (logprob,) = sample(LOGITS[None], [sampler])
        assert logprob == pytest.approx(float((LOGITS / of).log_softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2.0},
        {"max_tokens": 0},
        {"repetition_penalty": 0.0},
        {"logit_bias": {5: 1.0}},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(options))) as caught:
        check_sampling(Sampling(**options), 5)
    assert caught.value.kind == "bad_request"
