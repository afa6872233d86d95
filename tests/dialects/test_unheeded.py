"""Fields that nothing reads: named, as far as they ask for something, and never more than a report can hold."""

from __future__ import annotations

import msgspec
import pytest

from polar.dialects.unheeded import effort_args, unheeded


class Read(msgspec.Struct, rename="camel"):
    top_p: float | None = None


@pytest.mark.parametrize("raw", [False, True])
def test_what_asks_for_nothing_is_not_named(raw) -> None:
    given = {
        "topP": 1,
        "neutral": 1,
        "a": None,
        "b": [],
        "c": {},
        "d": "",
        "e": False,
        "one": [0],
        "two": {"x": None},
    }
    if raw:
        given = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in given.items()}
    assert [line.split()[0] for line in unheeded(given, Read, ("neutral",), where="x.")] == ["x.one", "x.two"]


def test_names_without_end_are_cut_and_control_characters_forge_no_line() -> None:
    lines = unheeded({f"{n}\nERROR forged{'x' * 1000}": 1 for n in range(1000)}, Read)
    assert len(lines) < 50
    assert "more fields" in lines[-1]
    assert all(len(line) < 200 and line.isprintable() for line in lines)


def test_an_effort_that_no_template_knows_is_said() -> None:
    warnings: list[str] = []
    assert effort_args(None, "effort", warnings) == {}
    assert effort_args("xhigh", "effort", warnings) == {"reasoning_effort": "high"}
    assert warnings == []
    assert effort_args("heroic", "effort", warnings) == {}
    assert warnings == ["effort 'heroic' was passed over: it is not known here"]
