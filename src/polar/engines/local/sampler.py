"""Choosing the next token, and naming its probability.

The reported logprob is that of the model's own distribution at the sampling temperature,
``log_softmax(logits / temperature)``, before penalties, biases, top-k, top-p and min-p (at temperature 0, the
greedy choice, that of temperature 1). That is what a trainer can compute again from the weights alone. Where
a call uses penalties, biases or truncation, the token was drawn from the distribution after them, and the
reported value is not its probability there: plain temperature sampling is what on-policy training wants.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from polar.contract.arrays import Ids
from polar.contract.chat import Sampling
from polar.engines.base import EngineError

GREEDY_BELOW = 1e-5
"""A temperature under this is 0: nothing but the likeliest token would be drawn."""

CANDIDATES = 1024
"""Top-p first looks at so many tokens; nearly always they hold the mass, and sorting 50,000 is slow."""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Refuse what cannot be sampled with.

    Raises:
        EngineError: ``bad_request``, naming the field.
    """

    def require(good: bool, what: str) -> None:
        if not good:
            raise EngineError("bad_request", what)

    require(sampling.temperature is None or sampling.temperature >= 0, "temperature must be 0 or more")
    require(sampling.top_p is None or 0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1")
    require(sampling.top_k is None or sampling.top_k >= -1, "top_k must be -1 (off), 0 (off) or more")
    require(sampling.min_p is None or 0 <= sampling.min_p <= 1, "min_p must be between 0 and 1")
    require(sampling.max_tokens is None or sampling.max_tokens >= 1, "max_tokens must be at least 1")
    repetition = sampling.repetition_penalty
    require(repetition is None or repetition > 0, "repetition_penalty must be above 0")
    bad = [i for i in sampling.logit_bias or () if not 0 <= i < vocab_size]
    require(not bad, f"logit_bias names the token id {bad[:1]}, outside the vocabulary of {vocab_size}")


class Sampler:
    """The sampling state of one call: its settings, its random stream, the tokens it has seen."""

    def __init__(self, sampling: Sampling, prompt: Ids, vocab_size: int) -> None:
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        self.greedy = temperature < GREEDY_BELOW
        self.temperature = 1.0 if self.greedy else temperature
        self._random = random.Random(sampling.seed)
        self._top_k = max(sampling.top_k or 0, 0)
        self._top_p = 1.0 if sampling.top_p is None else sampling.top_p
        self._min_p = sampling.min_p or 0.0
        self._presence = sampling.presence_penalty or 0.0
        self._frequency = sampling.frequency_penalty or 0.0
        self._repetition = 1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty
        self._bias = sampling.logit_bias or {}
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        if self._presence or self._frequency or self._repetition != 1.0:
            self._counts = torch.zeros(vocab_size)
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[prompt.tolist()] = True

    @property
    def plain(self) -> bool:
        """Nothing but the temperature shapes the distribution."""
        truncated = self._top_k or self._top_p < 1.0 or self._min_p
        return not (truncated or self._bias or self._counts is not None)

    def draw(self) -> float:
        """The next number of this call's random stream, in [0, 1)."""
        return self._random.random()

    def saw(self, token: int) -> None:
        """A token was sampled."""
        if self._counts is not None and self._seen is not None:
            self._counts[token] += 1
            self._seen[token] = True

    def choose(self, logits: Tensor) -> int:
        """A token from a row of logits [vocab], with everything that shapes the distribution."""
        logits = self._adjusted(logits)
        if self.greedy:
            return int(logits.argmax())
        probabilities = (logits / self.temperature).softmax(-1)
        weights, tokens = self._truncated(probabilities)
        return int(tokens[_pick(weights[None], [self.draw()])[0]])

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Repetition penalty over prompt and reply; presence and frequency penalties over the reply; biases."""
        if self._counts is not None and self._seen is not None:
            penalized = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
            logits = torch.where(self._seen, penalized, logits)
            logits = logits - self._frequency * self._counts - self._presence * (self._counts > 0)
        if self._bias:
            logits = logits.clone()
            logits[list(self._bias)] += torch.tensor(list(self._bias.values()))
        return logits

    def _truncated(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k, then top-p of what is left, then min-p: the weights that remain and their tokens."""
        size = len(probabilities)
        count = min(self._top_k or size, size)
        if self._top_p < 1.0:
            first = min(count, CANDIDATES)
            weights, tokens = probabilities.topk(first)
            # Without top-k the whole mass is 1, and the first candidates often suffice.
            if first < count and (self._top_k or float(weights.sum()) < self._top_p):
                weights, tokens = probabilities.topk(count)
            share = weights / weights.sum() if self._top_k else weights
            keep = share.cumsum(-1) - share < self._top_p
            keep[0] = True
            weights, tokens = weights[keep], tokens[keep]
        elif count < size:
            weights, tokens = probabilities.topk(count)
        else:
            weights, tokens = probabilities, torch.arange(size)
        if self._min_p:
            keep = weights >= self._min_p * weights.max()
            weights, tokens = weights[keep], tokens[keep]
        return weights, tokens


def _pick(weights: Tensor, draws: Sequence[float]) -> list[int]:
    """Columns of ``weights`` [rows, n] drawn in proportion, one a row, by inverting the cumulative sum.

    In float64: over a large vocabulary a float32 sum loses the rare tokens.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(draws, dtype=torch.float64)[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return [int(column) for column in picked.clamp_(max=weights.shape[1] - 1).tolist()]


def sample(logits: Tensor, samplers: Sequence[Sampler]) -> tuple[list[int], list[float]]:
    """One token and its logprob for each row of ``logits`` [rows, vocab]. A row's result does not depend on
    which other rows are in the batch."""
    temperatures = torch.tensor([s.temperature for s in samplers])[:, None]
    logprobs = (logits / temperatures).log_softmax(-1)
    tokens = [0] * len(samplers)
    drawn = [i for i, s in enumerate(samplers) if s.plain and not s.greedy]
    if drawn:
        picked = _pick(logprobs[drawn].exp(), [samplers[i].draw() for i in drawn])
        for row, token in zip(drawn, picked, strict=True):
            tokens[row] = token
    for row in set(range(len(samplers))) - set(drawn):
        tokens[row] = samplers[row].choose(logits[row])
    for sampler, token in zip(samplers, tokens, strict=True):
        sampler.saw(token)
    chosen = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return tokens, chosen.tolist()
