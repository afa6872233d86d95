"""What SGLang is asked for: everything that a call may set, under SGLang's names, and always ids and logprobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar.contract.arrays import ids
from polar.contract.chat import Sampling
from polar.engines.sglang_request import request_body
from tests.engines.sglang.conftest import PROMPT, Start, call
from tests.support.script import Step
from tests.support.scripted_sglang import scripted_sglang

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def settings(sampling: Sampling, *, limit: int = 100, incremental: bool = True, **more: Any) -> dict[str, Any]:
    body = request_body(
        ids(PROMPT),
        sampling,
        rid="r",
        stop_ids=frozenset({7, 2}),
        max_new_tokens=limit,
        incremental=incremental,
        **more,
    )
    found: dict[str, Any] = body["sampling_params"]
    return found


def test_ids_and_logprobs_are_asked_for_whatever_the_call_sets():
    body = request_body(ids(PROMPT), Sampling(), rid="r", stop_ids=frozenset(), max_new_tokens=5, incremental=True)
    assert body["input_ids"].tolist() == list(PROMPT)
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, True)
    assert body["sampling_params"] == {
        "max_new_tokens": 5,
        "stop_token_ids": [],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        **NEUTRAL,
    }


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_a_call_leaves_open_is_not_the_servers_to_fill_in(name: str):
    """By ``--preferred-sampling-params`` it would: logprobs would be of another distribution, and nobody told."""
    sampling = Sampling(**{set_: 0.5 for set_ in NEUTRAL if set_ not in (name, "top_k")})
    assert settings(sampling)[name] == NEUTRAL[name]


def test_every_setting_has_its_name():
    sampling = Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        max_tokens=10,
        stop=("a", "b"),
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={5: -100.0},
    )
    assert settings(sampling) == {
        "max_new_tokens": 100,
        "stop_token_ids": [2, 7],
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "sampling_seed": 3,
        "logit_bias": {"5": -100.0},
        "stop": ["a", "b"],
    }


@pytest.mark.parametrize(("ours", "theirs"), [(0, -1), (-1, -1), (1, 1)])
def test_no_bound_on_the_rank_is_minus_one(ours: int, theirs: int):
    assert settings(Sampling(top_k=ours))["top_k"] == theirs


def test_no_more_stop_strings_than_sglang_takes():
    words = tuple(f"w{n}" for n in range(40))
    assert settings(Sampling(stop=("", *words)))["stop"] == list(words[:32])


def test_a_schema_goes_as_text():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    found = settings(Sampling(), response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert found["json_schema"] == '{"type":"object","properties":{"a":{"type":"string"}}}'


@pytest.mark.parametrize(("limit", "interval"), [(1, 1), (64, 1), (256, 4), (32_000, 32)])
def test_a_stream_that_repeats_itself_comes_in_larger_steps_the_longer_it_may_get(limit: int, interval: int):
    assert settings(Sampling(), limit=limit, incremental=False)["stream_interval"] == interval
    assert "stream_interval" not in settings(Sampling(), limit=limit)


@pytest.mark.parametrize(("asked", "limit"), [(None, 28), (5, 5), (100, 28)])
async def test_the_limit_is_what_was_asked_for_and_fits(
    asked: int | None, limit: int, start: Start, model_dir: Path
) -> None:
    async with scripted_sglang(model_dir, [Step(text="hi")], max_model_len=32) as engine:
        await call(await start(engine.url), Sampling(max_tokens=asked))
        (generation,) = engine.model.log.generations
    assert generation.request["sampling_params"]["max_new_tokens"] == limit


def test_a_schema_is_text_under_its_own_name():
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert json.loads(settings(Sampling(), response_format=form)["json_schema"]) == schema
    anything = settings(Sampling(), response_format={"type": "json_object"})["json_schema"]
    assert json.loads(anything) == {"type": "object"}
    assert "json_schema" not in settings(Sampling())
