"""Test results read from the lines of test runners."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluators.statuses import CONFLICT, STATUSES, read_statuses

NAMES = st.text(st.characters(categories=["L", "N"], include_characters="_:/.[]-"), min_size=1).filter(
    lambda name: name.strip(":") == name and name not in STATUSES
)


@given(st.dictionaries(NAMES, st.sampled_from(STATUSES)), st.sampled_from(["{1} {0}", "{0} {1}", "{0}: {1}"]))
def test_each_form_gives_the_name_and_its_status(results: dict[str, str], form: str) -> None:
    assert read_statuses(form.format(name, status) for name, status in results.items()) == results


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("PASSED tests/test_a.py::test_one", "tests/test_a.py::test_one", "PASSED"),
        ("FAILED tests/test_a.py::test_two - assert 1 == 2", "tests/test_a.py::test_two", "FAILED"),
        ("tests/test_a.py::test_one[a b] PASSED          [ 50%]", "tests/test_a.py::test_one[a b]", "PASSED"),
        ("\x1b[32mPASSED\x1b[0m test_one", "test_one", "PASSED"),
        ("  test one: FAILED  ", "test one", "FAILED"),
        ("PASSED test[a - b]", "test[a - b]", "PASSED"),
    ],
)
def test_lines_of_real_runners(line: str, name: str, status: str) -> None:
    assert read_statuses([line])[name] == status


@pytest.mark.parametrize("line", ["", "PASSED", "all tests PASSED!", "xPASSED test", "3 passed in 0.1s"])
def test_other_lines_say_nothing(line: str) -> None:
    assert read_statuses([line]) == {}


def test_a_name_with_two_statuses_has_neither() -> None:
    assert read_statuses(["PASSED a", "a FAILED", "PASSED a", "PASSED b"]) == {"a": CONFLICT, "b": "PASSED"}


def test_a_line_that_the_code_under_test_began_counts_against_what_it_forged() -> None:
    lines = ["test_add: PASSED", ".test_add: FAILED"]
    assert read_statuses(lines, ["test_add"]) == {"test_add": "CONFLICT", ".test_add": "FAILED"}


def test_a_name_within_another_name_is_not_that_name() -> None:
    lines = ["test_add: PASSED", "test_add_more: FAILED"]
    assert read_statuses(lines, ["test_add"])["test_add"] == "PASSED"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("PASSED tests/test_a.py::test_one", "test_one"),
        ("PASSED tests/test_a.py::TestA::test_one - slow", "TestA.test_one"),
        ("tests/test_a.py::TestA::test_one PASSED [ 50%]", "TestA.test_one"),
    ],
)
def test_a_short_name_that_is_asked_for_stands_for_its_long_one(line: str, name: str) -> None:
    assert read_statuses([line], [name])[name] == "PASSED"
    assert name not in read_statuses([line])


def test_a_short_name_of_two_tests_needs_both() -> None:
    lines = ["PASSED a.py::test_one", "FAILED b.py::test_one"]
    assert read_statuses(lines, ["test_one"])["test_one"] == CONFLICT
