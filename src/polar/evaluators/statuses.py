"""Test results from what a test runner printed, in the forms that runners print them:

    PASSED tests/test_a.py::test_one
    FAILED tests/test_a.py::test_two - assert 1 == 2
    tests/test_a.py::test_one PASSED                  [ 50%]
    test_one: PASSED

What a test runner prints can also be printed by the code it tests. So a name with two different statuses has
neither: a forged line can spoil a result, and can't mend one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
CONFLICT = "CONFLICT"
_WORD = "|".join(STATUSES)
_FIRST = re.compile(rf"({_WORD}):?\s+(\S.*)")
_LAST = re.compile(rf"(\S.*?):?\s+({_WORD})(?:\s+\[\s*\d+%\])?")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def read_statuses(lines: Iterable[str]) -> dict[str, str]:
    """Name to status; ``CONFLICT`` for a name that has several."""
    found: dict[str, str] = {}
    for line in lines:
        line = _COLORS.sub("", line).strip()
        if match := _FIRST.fullmatch(line):
            status, name = match.groups()
            _note(found, name, status)
            if " - " in name:
                _note(found, name.split(" - ")[0].rstrip(), status)
        elif match := _LAST.fullmatch(line):
            _note(found, match[1], match[2])
    return found


def _note(found: dict[str, str], name: str, status: str) -> None:
    found[name] = status if found.get(name, status) == status else CONFLICT
