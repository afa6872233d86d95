"""How old the weights were: in each trace, and over a run."""

from __future__ import annotations

from typing import Any

import pytest

from polar.contract.completion import Completion, WeightSpan
from polar.contract.task import BuilderSpec
from polar.results import Report
from polar.trajectories.assemble import assemble, record_evaluation
from tests.trajectories.making import completion, following, result


def spans(*parts: tuple[str, int, int]) -> dict[str, Any]:
    return {"weight_spans": tuple(WeightSpan(*part) for part in parts)}


def conversation() -> list[Completion]:
    """Two calls of one trace, over an update in the middle of the first."""
    first = completion(0, [1], [2, 3, 4], **spans(("40", 0, 1), ("41", 1, 3)))
    return [first, following(first, [5], [6, 7], **spans(("43", 0, 2)))]


def built(completions: list[Completion], policy_version: object = None) -> dict[str, Any]:
    [trace] = assemble(completions, BuilderSpec(), policy_version=policy_version).traces
    return trace.metadata


def test_a_trace_says_its_oldest_and_its_newest_version() -> None:
    metadata = built(conversation())
    assert (metadata["weight_version_min"], metadata["weight_version_max"]) == (40, 43)
    assert "staleness" not in metadata


@pytest.mark.parametrize(("asked", "staleness"), [(42, 2), ("42", 2), (40, 0), (39, -1)])
def test_staleness_counts_from_the_policy_that_the_task_asked_for(asked: object, staleness: int) -> None:
    assert built(conversation(), asked)["staleness"] == staleness


@pytest.mark.parametrize("asked", [None, "latest", 4.5])
def test_where_the_policy_is_no_number_there_is_no_staleness(asked: object) -> None:
    assert "staleness" not in built(conversation(), asked)


def test_names_have_an_order_but_no_distance() -> None:
    metadata = built([completion(0, [1], [2, 3], **spans(("base", 0, 1), ("tuned", 1, 2)))], 42)
    assert metadata["weight_version_names"] == {"base": 0, "tuned": 1}
    assert (metadata["weight_version_min"], metadata["weight_version_max"]) == (0, 1)
    assert "staleness" not in metadata


def test_where_no_version_is_known_none_is_made_up() -> None:
    metadata = built([completion(0, [1], [2, 3])], 42)
    assert not [name for name in metadata if name.startswith("weight") or name == "staleness"]


def test_traces_of_several_distributions_are_called_mixed() -> None:
    first = completion(0, [1], [2, 3], metadata={"logprobs": "sampling"})
    second = following(first, [5], [6], metadata={"logprobs": "raw"})
    assert built([first])["logprobs"] == "sampling"
    assert built([first, second])["logprobs"] == "mixed"


def test_a_runs_report_sums_versions_staleness_and_warnings_up() -> None:
    report = Report()
    warned = {"metadata": {"logprobs_warning": "beware"}}
    sessions = [
        conversation(),
        [completion(0, [1], [2, 3], **spans(("43", 0, 2)), **warned)],
        [completion(0, [1], [2], **spans(("base", 0, 1)), **warned), completion(1, [9], [8], **warned)],
    ]
    for calls in sessions:
        trajectory = assemble(calls, BuilderSpec(), policy_version=43)
        record_evaluation(trajectory)
        ended = result()
        ended.trajectory = trajectory
        report.add(ended)
    body = report.body([], unfinished=0)
    assert body["weights"] == {
        "tokens_by_version": {"40": 1, "41": 2, "43": 4, "base": 1},
        "mixed_traces": 1,
        "staleness": {"min": 0, "mean": 1.5, "max": 3},
    }
    assert body["warnings"] == {"beware": 2}
