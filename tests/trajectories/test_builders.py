"""How a task names its builder, and what it is told when it names none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from polar.contract.completion import Completion
from polar.contract.errors import UsageError
from polar.contract.result import Reconstruction
from polar.contract.task import BuilderSpec
from polar.trajectories import make_builder
from polar.trajectories.base import Built

from .making import completion


class Mine:
    name = "mine"

    def __init__(self, keep: int = 1) -> None:
        self.keep = keep

    def build(self, completions: Sequence[Completion]) -> Built:
        return Built([], Reconstruction(tokens_trained=self.keep))


class NoBuilder:
    pass


def test_prefix_merging_is_the_default() -> None:
    assert make_builder(BuilderSpec()).name == "prefix_merging"
    assert make_builder(BuilderSpec(strategy="per_request")).name == "per_request"


def test_an_unknown_builder_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown builder 'prefix'.*prefix_merging, per_request"):
        make_builder(BuilderSpec(strategy="prefix"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"drfit": "split"}, r"drfit.*config keys: drift, end_of_turn_token_id, include_roles"),
        ({"drift": "glue"}, r"glue"),
        ({"include_roles": ["boss"]}, r"boss"),
        ({"end_of_turn_token_id": "x"}, r"end_of_turn_token_id"),
    ],
)
def test_a_bad_config_is_refused_with_the_keys_there_are(config: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_builder(BuilderSpec(config=config))


def test_per_request_has_nothing_to_set() -> None:
    with pytest.raises(UsageError, match="config keys: none"):
        make_builder(BuilderSpec(strategy="per_request", config={"drift": "split"}))


def test_a_custom_builder_is_imported_where_it_may_be() -> None:
    spec = BuilderSpec(strategy=f"{__name__}:Mine", config={"keep": 5})
    assert make_builder(spec, allow_import=True).build([completion(0, [1], [2])]).reconstruction.tokens_trained == 5
    with pytest.raises(UsageError, match="--allow-import"):
        make_builder(spec)


@pytest.mark.parametrize("strategy", ["no_such_module_here:X", f"{__name__}:Nobody", f"{__name__}:NoBuilder"])
def test_a_custom_builder_that_is_none_is_named(strategy: str) -> None:
    with pytest.raises(UsageError, match=strategy):
        make_builder(BuilderSpec(strategy=strategy), allow_import=True)


def test_a_custom_builder_with_a_wrong_config_is_named() -> None:
    with pytest.raises(UsageError, match=r"Mine.*wrong"):
        make_builder(BuilderSpec(strategy=f"{__name__}:Mine", config={"wrong": 1}), allow_import=True)
