"""Prompts start from what is already computed, and nothing about the reply changes by that."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from polar.contract.arrays import ids

from .calls import call, prompt_of
from .conftest import StartEngine


async def test_the_next_turn_of_a_session_starts_where_the_last_ended(start: StartEngine) -> None:
    warm, cold = await start(), await start()
    first = prompt_of(60)
    reply = await call(warm, first, seed=1, max_tokens=20)
    second = np.concatenate([first, ids(reply.ids), prompt_of(10, seed=9)])
    again = await call(warm, second, seed=2, max_tokens=20)
    fresh = await call(cold, second, seed=2, max_tokens=20)
    # The token sampled last was never an input, so its keys and values are not there.
    assert (again.cached_tokens, fresh.cached_tokens) == (79, 0)
    assert again.ids == fresh.ids
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


async def test_two_branches_of_one_conversation_share_its_start(start: StartEngine) -> None:
    warm, cold = await start(), await start()
    base = prompt_of(50)
    await call(warm, base, max_tokens=5)
    branches = [np.concatenate([base, prompt_of(12, seed=n)]) for n in (1, 2, 3)]
    replies = await asyncio.gather(*(call(warm, b, seed=4, max_tokens=8) for b in branches))
    for branch, reply in zip(branches, replies, strict=True):
        fresh = await call(cold, branch, seed=4, max_tokens=8)
        assert reply.cached_tokens >= 50
        assert reply.ids == fresh.ids
        assert reply.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)


async def test_samples_of_one_prompt_that_come_at_once_compute_it_once(start: StartEngine) -> None:
    engine, prompt = await start(), prompt_of(200)
    replies = await asyncio.gather(*(call(engine, prompt, seed=n, max_tokens=4) for n in range(8)))
    assert sorted(reply.cached_tokens for reply in replies) == [0] + [199] * 7


async def test_the_same_prompt_again_computes_only_its_last_token(start: StartEngine) -> None:
    engine, prompt = await start(), prompt_of(30)
    first = await call(engine, prompt, temperature=0.0, max_tokens=5)
    again = await call(engine, prompt, temperature=0.0, max_tokens=5)
    assert again.cached_tokens == 29
    assert again.ids == first.ids


async def test_the_least_recently_used_prefix_makes_room(start: StartEngine) -> None:
    engine = await start(kv_tokens=700)
    old, new = prompt_of(40, seed=1), prompt_of(40, seed=2)
    await call(engine, old, max_tokens=2)
    await call(engine, new, max_tokens=2)
    await call(engine, prompt_of(40, seed=3), max_tokens=2)
    assert (await call(engine, new, max_tokens=2)).cached_tokens == 39
    assert (await call(engine, old, max_tokens=2)).cached_tokens < 39
