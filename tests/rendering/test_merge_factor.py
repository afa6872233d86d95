"""The merge factors in docs/rendering.md must be true.

Of the CLIs' sessions a sample of three rows is worked out where slow tests are left out: a family that is append-only
in a tool loop, one that never is, and one that is not where text stands beside a call.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rendering import merge_factor
from tests.rendering.conformance import PAGE, replaced
from tests.rendering.models import MODELS

OUT_OF_DATE = "run python -m tests.rendering.merge_factor"
SAMPLE = ("Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "openai-gpt-oss-120b")


@pytest.mark.assets
@pytest.mark.parametrize("name", SAMPLE)
def test_the_rows_of_some_families_are_up_to_date(name: str, assets: Path) -> None:
    model = next(model for model in MODELS if model.name == name)
    row = merge_factor.recorded_row(assets, merge_factor.recorded(), model)
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), OUT_OF_DATE


@pytest.mark.assets
@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "table"),
    [(merge_factor.RECORDED, merge_factor.recorded_table), (merge_factor.MADE, merge_factor.made_table)],
    ids=["recorded", "made"],
)
def test_a_table_is_up_to_date(marks: tuple[str, str], table: Callable[[Path], str], assets: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert marks[0] in page
    assert page == replaced(page, *marks, table(assets)), OUT_OF_DATE


def test_recorded_sessions_are_read(tmp_path: Path) -> None:
    """What a CLI sent, call by call: the replies are found in what it sent back."""
    first = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": []}
    reply = {"role": "assistant", "content": "Hello", "tool_calls": [{"id": "c", "name": "f", "arguments": "{}"}]}
    more = {"role": "tool", "content": "done", "tool_call_id": "c"}
    second = {**first, "messages": [*first["messages"], reply, more]}  # type: ignore[misc]
    (tmp_path / "cli.json.gz").write_bytes(gzip.compress(json.dumps([first, second]).encode()))
    (session,) = merge_factor.recorded(tmp_path)
    assert session.name == "cli"
    assert [message.role for message in session.opening] == ["user"]
    assert [(turn.reply.content, len(turn.follow)) for turn in session.turns] == [("Hello", 1)]
