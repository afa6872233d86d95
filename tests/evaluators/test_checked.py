"""What evaluators of other people's making return."""

from __future__ import annotations

import numpy as np
import pytest

from polar.evaluators.base import Evaluation, EvaluationFailed, checked


def test_numbers_of_any_make_become_rewards() -> None:
    found = checked(Evaluation(np.float32(0.5), [np.int64(1), True], {"n": np.zeros(2, dtype=np.int32)}), "x")
    assert (found.outcome_reward, found.trace_rewards, found.metadata) == (0.5, [1.0, 1.0], {"n": [0, 0]})
    assert checked(Evaluation(), "x") == Evaluation()


@pytest.mark.parametrize(
    "returned",
    [
        1.0,
        None,
        Evaluation(float("nan")),
        Evaluation("1"),  # type: ignore[arg-type]
        Evaluation(trace_rewards=[1.0, float("inf")]),
        Evaluation(metadata={"x": object()}),
    ],
)
def test_what_is_no_evaluation_fails_in_one_line_that_names_it(returned: object) -> None:
    with pytest.raises(EvaluationFailed, match="evaluator mine returned"):
        checked(returned, "mine")
