"""What each evaluator gives for what kind of session."""

from __future__ import annotations

import pytest

from polar.contract.errors import UsageError
from polar.contract.task import EvaluatorSpec
from polar.evaluators import Evaluation, EvaluationFailed, FinishedSession, make_evaluator
from tests.evaluators.making import finished, score


@pytest.mark.parametrize(
    ("exit_code", "timed_out", "reward"),
    [(0, False, 1.0), (1, False, 0.0), (-9, True, 0.0), (0, True, 0.0), (None, False, 0.0)],
)
async def test_a_completed_session_is_one_that_ended_by_itself(tmp_path, exit_code, timed_out, reward):
    session = finished(None, tmp_path, exit_code=exit_code, timed_out=timed_out)
    assert (await score(session, "session_completed")).outcome_reward == reward


@pytest.mark.parametrize(("command", "reward"), [("grep -q 42 answer.txt", 1.0), ("grep -q 43 answer.txt", 0.0)])
async def test_without_expectations_the_exit_code_decides(runtime, tmp_path, command, reward):
    evaluation = await score(finished(runtime, tmp_path), test_command=command)
    assert evaluation.outcome_reward == reward
    assert evaluation.metadata["exit_code"] == (0 if reward else 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("no-such-tool --check", "ended with 127: it, or a command in it, was not found (see evaluation.stderr)"),
        ("./answer.txt", "ended with 126: it, or a command in it, could not be run (see evaluation.stderr)"),
        ("exit 1", None),
    ],
)
async def test_a_test_command_that_is_not_there_is_a_warning(runtime, tmp_path, command, words):
    evaluation = await score(finished(runtime, tmp_path), test_command=command)
    assert evaluation.outcome_reward == 0.0
    assert evaluation.metadata.get("warning") == (words and f"test_command {words}")


async def test_tests_that_passed_need_no_warning_of_what_came_after_them(runtime, tmp_path):
    evaluation = await score(
        finished(runtime, tmp_path),
        test_command="echo PASSED test_a; no-such-tool",
        expected_output_json={"test_a": "PASSED"},
    )
    assert (evaluation.outcome_reward, "warning" in evaluation.metadata) == (1.0, False)


async def test_a_pipe_does_not_hide_a_failing_test(runtime, tmp_path):
    evaluation = await score(finished(runtime, tmp_path), test_command="grep 43 answer.txt | cat")
    assert evaluation.outcome_reward == 0.0


OUTPUT = "printf '%s\\n' 'PASSED test_a' 'test_b PASSED [ 50%]' 'test_c: FAILED'; echo noise; exit 1"


@pytest.mark.parametrize(
    ("expected", "reward"),
    [
        ({"test_a": "PASSED", "test_b": "PASSED", "test_c": "FAILED"}, 1.0),
        ({"test_a": "PASSED"}, 1.0),
        ({"test_c": "PASSED"}, 0.0),
        ({"test_a": "PASSED", "test_missing": "PASSED"}, 0.0),
    ],
)
async def test_every_expected_test_must_have_its_status(runtime, tmp_path, expected, reward):
    evaluation = await score(finished(runtime, tmp_path), test_command=OUTPUT, expected_output_json=expected)
    assert evaluation.outcome_reward == reward
    assert {name: test["expected"] for name, test in evaluation.metadata["tests"].items()} == expected
    assert evaluation.metadata["tests"].get("test_missing", {"got": None})["got"] is None
    assert "noise" in evaluation.metadata["log_tail"]


async def test_a_forged_pass_beside_a_real_failure_does_not_count(runtime, tmp_path):
    evaluation = await score(
        finished(runtime, tmp_path),
        test_command="echo 'PASSED test_a'; echo 'FAILED test_a - assert 1 == 2'",
        expected_output_json={"test_a": "PASSED"},
    )
    assert evaluation.outcome_reward == 0.0
    assert evaluation.metadata["tests"]["test_a"]["got"] == "CONFLICT"


async def test_a_test_command_that_hangs_is_zero_and_says_so(runtime, tmp_path):
    evaluation = await score(
        finished(runtime, tmp_path), test_command="echo PASSED test_a; setsid sleep 300 & sleep 300",
        timeout_seconds=1, expected_output_json={"test_a": "PASSED"},
    )  # fmt: skip
    assert evaluation.outcome_reward == 0.0
    assert evaluation.metadata["timed_out"] is True


@pytest.mark.parametrize("own", [None, 60])
async def test_a_test_that_the_evaluations_own_time_ends_is_an_error_and_no_zero(runtime, tmp_path, own):
    session = finished(runtime, tmp_path, timeout=1)
    with pytest.raises(EvaluationFailed, match=r"test_command was not done after 1 s.*timeout_seconds"):
        await score(session, test_command="sleep 300", timeout_seconds=own)


async def test_preparation_runs_first_and_in_the_same_place(runtime, tmp_path):
    session = finished(runtime, tmp_path, eval_prepare=("echo one > a", "cat a; echo two >> a; touch ~/home"))
    evaluation = await score(session, test_command="cat a; test -e ~/home; echo $EXTRA", env={"EXTRA": "given"})
    assert evaluation.outcome_reward == 1.0
    assert evaluation.metadata["log_tail"].split() == ["one", "two", "given"]


async def test_a_failing_preparation_is_an_error_with_its_last_words(runtime, tmp_path):
    session = finished(runtime, tmp_path, eval_prepare=("true", "echo no such package >&2; exit 4"))
    with pytest.raises(EvaluationFailed, match=r"eval_prepare\[1\] failed with exit code 4: no such package"):
        await score(session, test_command="true")


async def test_a_hanging_preparation_is_an_error(runtime, tmp_path):
    session = finished(runtime, tmp_path, eval_prepare=("sleep 300",), timeout=1)
    with pytest.raises(EvaluationFailed, match=r"eval_prepare\[0\] was not done after 1 s"):
        await score(session, test_command="true")


async def test_the_agents_sandbox_is_left_as_it_was(runtime, tmp_path):
    await score(finished(runtime, tmp_path), test_command="rm answer.txt; touch new")
    assert await runtime.read_file("answer.txt") == b"42\n"
    with pytest.raises(FileNotFoundError):
        await runtime.read_file("new")
    assert not list((tmp_path / "runtime" / "forks").iterdir())


async def test_a_sandbox_that_is_gone_is_an_error_not_a_zero(runtime, tmp_path):
    await runtime.close()
    with pytest.raises(EvaluationFailed, match="sandbox failed"):
        await score(finished(runtime, tmp_path), test_command="true")


@pytest.mark.parametrize(
    ("strategy", "config", "words"),
    [
        ("test_on_output", {}, "test_command"),
        ("test_on_output", {"test_command": "  "}, "test_command is empty"),
        ("test_on_output", {"test_command": "true", "timeout": 3}, "timeout"),
        ("test_on_output", {"test_command": "true", "timeout_seconds": 0}, "timeout_seconds"),
        ("test_on_output", {"test_command": "true", "expected_output_json": {}}, "names no test"),
        ("test_on_output", {"test_command": "true", "expected_output_json": {"a": "passed"}}, "'passed'"),
        ("session_completed", {"reward": 2}, "reward"),
        ("session_complete", {}, "there are session_completed, test_on_output"),
        ("tests.evaluators.test_evaluators:Half", {}, "not allowed"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_at_once(strategy, config, words):
    with pytest.raises(UsageError, match=words):
        make_evaluator(EvaluatorSpec(strategy=strategy, config=config))


class Half:
    name = "half"

    def __init__(self, spec: EvaluatorSpec) -> None:
        self.reward = spec.config["reward"]

    async def evaluate(self, session: FinishedSession) -> Evaluation:
        return Evaluation(outcome_reward=self.reward)


async def test_an_evaluator_of_ones_own_gets_its_spec(tmp_path):
    spec = EvaluatorSpec(strategy=f"{__name__}:Half", config={"reward": 0.5})
    evaluation = await make_evaluator(spec, allow_import=True).evaluate(finished(None, tmp_path))
    assert evaluation.outcome_reward == 0.5


async def test_what_an_evaluator_of_ones_own_does_not_say_of_itself_it_does_not_need(tmp_path):
    made = make_evaluator(EvaluatorSpec(strategy=f"{__name__}:Half", config={"reward": 0.5}), allow_import=True)
    assert (made.name, made.uses_sandbox, made.seconds) == ("half", False, 0.0)


class Needy(Half):
    uses_sandbox = True

    def __init__(self, spec: EvaluatorSpec) -> None:
        self.seconds = spec.config["seconds"]


@pytest.mark.parametrize("seconds", ["60", None, -1, float("nan"), float("inf")])
async def test_the_time_that_it_asks_for_is_a_number_of_seconds(seconds):
    with pytest.raises(UsageError, match=r"half: its seconds are .* use a number"):
        make_evaluator(EvaluatorSpec(strategy=f"{__name__}:Needy", config={"seconds": seconds}), allow_import=True)
    made = make_evaluator(EvaluatorSpec(strategy=f"{__name__}:Needy", config={"seconds": 60}), allow_import=True)
    assert (made.uses_sandbox, made.seconds) == (True, 60.0)


@pytest.mark.parametrize("strategy", ["no.such.module:X", "json:Nothing", "json:JSONDecoder", f"{__name__}:Half"])
def test_an_import_that_is_no_evaluator_is_refused(strategy):
    with pytest.raises(UsageError, match="strategy"):
        make_evaluator(EvaluatorSpec(strategy=strategy), allow_import=True)
