"""Random sessions against the engine's own log: context-exact, nothing vanishes, a shared prefix trained once."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.contract.arrays import to_json
from polar.contract.task import BuilderSpec
from polar.trajectories import make_builder
from polar.trajectories.base import Built

from .harness import sessions
from .oracle import check_session, check_splits_are_needed, check_storage
from .toy import ToyGateway

modest = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def build(gateway: ToyGateway, strategy: str = "prefix_merging", **config: object) -> Built:
    return make_builder(BuilderSpec(strategy=strategy, config=config)).build(gateway.completions())


@modest
@given(sessions())
def test_every_trained_token_stands_where_the_engine_sampled_it(gateway: ToyGateway) -> None:
    built = build(gateway)
    check_session(gateway, built)
    assert all(trace.metadata["context_exact"] for trace in built.traces)


@modest
@given(sessions())
def test_traces_are_as_long_as_they_can_be(gateway: ToyGateway) -> None:
    check_splits_are_needed(gateway, build(gateway))


@modest
@given(sessions(mode="chat"))
def test_splicing_keeps_sampled_ids_and_says_where_context_drifted(gateway: ToyGateway) -> None:
    spliced, split = build(gateway, drift="splice"), build(gateway)
    check_session(gateway, spliced)
    assert len(spliced.traces) <= len(split.traces)
    assert spliced.reconstruction.tokens_trained == split.reconstruction.tokens_trained
    for trace in spliced.traces:
        assert trace.metadata["context_exact"] == (not trace.metadata.get("drifted_tokens"))


@modest
@given(sessions())
def test_per_request_trains_each_call_once(gateway: ToyGateway) -> None:
    built = build(gateway, "per_request")
    check_session(gateway, built)
    assert all(len(trace.completion_ids) == 1 for trace in built.traces)


@modest
@given(sessions(), st.sampled_from((["main"], ["main", "subagent"], ["auxiliary"])))
def test_left_out_roles_are_accounted_for(gateway: ToyGateway, roles: list[str]) -> None:
    built = build(gateway, include_roles=roles)
    check_session(gateway, built)
    assert {trace.role for trace in built.traces} <= set(roles)


@modest
@given(sessions())
def test_storage_gives_back_what_was_said(gateway: ToyGateway) -> None:
    check_storage(gateway)


@modest
@given(sessions(), st.randoms(use_true_random=False), st.sampled_from(("split", "splice")))
def test_the_order_of_completions_does_not_matter(gateway: ToyGateway, rng: random.Random, drift: str) -> None:
    builder = make_builder(BuilderSpec(config={"drift": drift}))
    shuffled = gateway.completions()
    rng.shuffle(shuffled)
    assert to_json(builder.build(shuffled)) == to_json(builder.build(gateway.completions()))


@modest
@given(sessions())
def test_a_fork_stands_behind_the_trace_that_owns_its_prefix(gateway: ToyGateway) -> None:
    """A completion that is context in one trace is trained in an earlier one, or not at all."""
    traces = build(gateway).traces
    owner = {name: index for index, trace in enumerate(traces) for name in trace.completion_ids}
    for index, trace in enumerate(traces):
        completion = gateway.graph.get(trace.completion_ids[0])
        while completion is not None and completion.parent_id and completion.split is None:
            completion = gateway.graph.get(completion.parent_id)
            assert completion is not None
            assert owner.get(completion.completion_id, -1) < index
