"""Choosing rows: a little language that can only compare."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.contract.errors import UsageError
from polar.trajectories.where import compile_where

ROW: dict[str, Any] = {
    "task_id": "t",
    "session_id": "s",
    "attempt": 2,
    "trace_index": 0,
    "group_id": "g",
    "reward": 0.5,
    "role": "main",
    "harness": None,
    "model": "m",
    "finish_reason": "stop",
    "status": "COMPLETED",
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("reward >= 0.5", True),
        ("reward > 0.5", False),
        ('role == "main" and reward > 0', True),
        ('role == "subagent" or attempt == 2', True),
        ("not reward > 0", False),
        ("0 < reward <= 1", True),
        ("reward > -1", True),
        ('role in ["main", "subagent"]', True),
        ('status not in ("ERROR", "TIMEOUT")', True),
        ("harness is None", True),
        ("harness != None", False),
        ("reward is not None", True),
        ('harness == "codex"', False),
        (' finish_reason == "stop" ', True),
    ],
)
def test_what_holds_of_a_row(text: str, holds: bool) -> None:
    assert compile_where(text)(ROW) is holds


def test_a_missing_reward_is_neither_above_nor_below() -> None:
    row = {**ROW, "reward": None}
    for text in ("reward >= 1", "reward < 1", "reward == 0", "0 <= reward"):
        assert compile_where(text)(row) is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "reward",
        "1",
        "reward >",
        "rewrad > 1",
        "reward + 1 > 2",
        "__import__('os').system('true') == 0",
        "role.upper() == 'MAIN'",
        "role[0] == 'm'",
        "(lambda: 1)() == 1",
        "reward > 'a'",
        "role >= 1",
        "role in 'main'",
        "[r for r in (1,)] == reward",
        "f'{role}' == 'main'",
        "reward == 1; reward",
        "(reward := 1) == 1",
        "\x00",
        "attempt == 1and reward > 0",
        "not " * 5000 + "reward > 1",
    ],
)
def test_anything_else_is_refused_with_the_columns_there_are(text: str) -> None:
    with pytest.raises(UsageError, match=r"columns: task_id, session_id.*reward, role"):
        compile_where(text)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="reward ><=!'\"()[]andotirle.,0123456789-+*:\n", max_size=30))
def test_no_text_does_anything_but_compare_or_fail(text: str) -> None:
    try:
        condition = compile_where(text)
    except UsageError:
        return
    assert condition(ROW) in (True, False)
