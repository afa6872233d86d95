"""A session's completions as a trajectory, and who gets its reward."""

from __future__ import annotations

import pytest

from polar.contract.arrays import from_json, to_json
from polar.contract.result import Trajectory
from polar.contract.task import BuilderSpec
from polar.trajectories import rewards
from polar.trajectories.assemble import assemble, record_evaluation

from .making import completion, following, trace
from .toy import BASH, system, user


def session() -> Trajectory:
    title = completion(0, [9], [8], model_used="small", messages=(system("title"), user("x")))
    main = completion(1, [1], [2], tools=(BASH,), messages=(system(), user("x")))
    more = following(main, [3], [4], tools=(BASH,))
    gone = following(more, [5], [], outcome="no_token_ids", tools=(BASH,))
    provenance = {"engine": "toy"}
    return assemble([gone, more, main, title], BuilderSpec(), status="TIMEOUT", error="late", provenance=provenance)


def test_the_trajectory_says_what_became_of_every_call() -> None:
    trajectory = session()
    assert (trajectory.status, trajectory.error) == ("TIMEOUT", "late")
    assert trajectory.metadata == {
        "builder": "prefix_merging",
        "api_type": "openai_chat",
        "model_requested": "asked",
        "model_used": "used",
        "record_count": 4,
        "trace_count": 2,
        "merge_factor": 1.5,
        "warnings": [],
        "reconstruction": {
            "completions": {"auxiliary": ["c0"], "trained": ["c1", "c2"], "no_token_ids": ["c3"]},
            "tokens_trained": 3,
            "splits": [{"completion_id": "c1", "reason": "new_conversation"}],
        },
        "provenance": {"engine": "toy"},
    }


def test_what_calls_asked_for_and_did_not_get_is_the_session_s_to_say() -> None:
    asked = completion(0, [1], [2], metadata={"warnings": ["tool_choice was dropped"]})
    again = following(asked, [3], [], outcome="aborted", metadata={"warnings": ["tool_choice was dropped", "n too"]})
    misled = following(asked, [4], [5], 2, metadata={"logprobs_warning": "beware"})
    trajectory = assemble([asked, again, misled], BuilderSpec())
    assert trajectory.metadata["warnings"] == ["beware", "tool_choice was dropped", "n too"]


def test_the_outcome_goes_to_main_and_not_to_the_title() -> None:
    trajectory = session()
    record_evaluation(trajectory, outcome_reward=1, evaluation={"passed": 3})
    assert [(t.role, t.reward) for t in trajectory.traces] == [("auxiliary", None), ("main", 1.0)]
    assert trajectory.metadata["evaluation"] == {"passed": 3, "outcome_reward": 1}


def test_an_empty_session_has_a_trajectory_too() -> None:
    trajectory = assemble([], BuilderSpec(), status="ERROR", error="no model call")
    assert trajectory.traces == []
    assert trajectory.metadata["model_used"] is None
    assert trajectory.metadata["merge_factor"] == 0.0


def test_a_trajectory_travels_as_json() -> None:
    trajectory = session()
    record_evaluation(trajectory, trace_rewards=[0.25, 0.5])
    again = from_json(to_json(trajectory), Trajectory)
    assert to_json(again) == to_json(trajectory)
    assert [t.reward for t in again.traces] == [0.25, 0.5]


def test_sub_agents_share_the_outcome() -> None:
    traces = [trace(role=role) for role in ("main", "subagent", "auxiliary")]
    rewards.assign(traces, 0.5)
    assert [t.reward for t in traces] == [0.5, 0.5, None]
    rewards.assign(traces)
    assert [t.reward for t in traces] == [None, None, None]


def test_a_reward_for_each_trace_reaches_auxiliary_ones_too() -> None:
    traces = [trace(role="main"), trace(role="auxiliary")]
    rewards.assign(traces, outcome_reward=1.0, trace_rewards=[0.0, 2])
    assert [t.reward for t in traces] == [0.0, 2.0]


def test_rewards_that_do_not_fit_the_traces_are_refused() -> None:
    with pytest.raises(ValueError, match="3 trace rewards for 1 traces"):
        rewards.assign([trace()], trace_rewards=[1, 2, 3])
