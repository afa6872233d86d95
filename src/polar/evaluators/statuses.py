"""Test results from what a test runner printed, in the forms that runners print them:

    PASSED tests/test_a.py::test_one
    FAILED tests/test_a.py::test_two - assert 1 == 2
    tests/test_a.py::test_one PASSED                  [ 50%]
    test_one: PASSED

What a test runner prints can also be printed by the code it tests. So a name with two different statuses has
neither, also where a line does not stand by itself (the code may have written half of it). Code that forges every
line and ends well can't be told from good code by its output.
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


_ANY = re.compile(rf"\b({_WORD})\b")


def read_statuses(lines: Iterable[str], names: Iterable[str] = ()) -> dict[str, str]:
    """Name to status; ``CONFLICT`` for a name that has several.

    Args:
        names: for these, a status anywhere on a line with the name counts against another one. One that is the
            ``function`` or ``Class.method`` of a longer name (``tests/test_a.py::function``) stands for it.
    """
    found: dict[str, str] = {}
    known = [(name, re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")) for name in names]
    short = {name for name, _ in known}
    for line in lines:
        line = _COLORS.sub("", line).strip()
        if match := _FIRST.fullmatch(line):
            status, name = match.groups()
            _note(found, name, status)
            if " - " in name:
                name = name.split(" - ")[0].rstrip()
                _note(found, name, status)
            _note_short(found, short, name, status)
        elif match := _LAST.fullmatch(line):
            _note(found, match[1], match[2])
            _note_short(found, short, match[1], match[2])
        for name, pattern in known:
            if name in found and name in line and (status := _other(line, found[name])) and pattern.search(line):
                _note(found, name, status)
    return found


def _other(line: str, status: str) -> str | None:
    return next((word for word in _ANY.findall(line) if word != status), None)


def _note(found: dict[str, str], name: str, status: str) -> None:
    found[name] = status if found.get(name, status) == status else CONFLICT


def _note_short(found: dict[str, str], wanted: set[str], name: str, status: str) -> None:
    _, *inside = name.split("::")
    if inside and (short := ".".join(inside[-2:])) in wanted:
        _note(found, short, status)
