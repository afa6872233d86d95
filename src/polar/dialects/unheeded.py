"""Why in one place: vendors add request fields every week, and none of them may be dropped in silence. A field that
nothing here reads is named in a warning, unless it is known to change no reply (who pays, who asks, where it runs).

How long a model may think has a word of its own in each API; templates of open models have theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

_UNASKED: tuple[Any, ...] = (None, False, "", [], {})
_UNASKED_JSON = (b"null", b"false", b'""', b"[]", b"{}")

_MOST = 20
"""Fields that are named one by one: vendors add a few, and what invents more is no client of theirs."""

_EFFORT: dict[str, dict[str, Any]] = {
    "none": {"enable_thinking": False},
    "minimal": {"reasoning_effort": "low"},
    "low": {"reasoning_effort": "low"},
    "medium": {"reasoning_effort": "medium"},
    "high": {"reasoning_effort": "high"},
    "xhigh": {"reasoning_effort": "high"},
    "max": {"reasoning_effort": "high"},
}
"""Efforts as the variables that open models' templates read; a template passes over those it does not know."""


def unheeded(
    given: Mapping[str, Any], read: type[msgspec.Struct], neutral: Collection[str] = (), *, where: str = ""
) -> list[str]:
    """A warning for each field that asks for something and is neither one of ``read`` nor ``neutral``.

    Args:
        given: an object of the request; its values may be raw JSON.
        read: the type that it is read as.
        neutral: fields without which the reply would be the same.
        where: the object's place in the request, with a full stop at its end.
    """
    known = {*read.__struct_encode_fields__, *neutral}
    names = [name for name, value in given.items() if name not in known and _asks(value)]
    lines = [f"{where}{_short(name)} was passed over: nothing here reads it" for name in names[:_MOST]]
    rest = len(names) - len(lines)
    return [*lines, f"{rest} more fields were passed over"] if rest else lines


def _short(name: str) -> str:
    """A name as it fits into a line, whatever it is."""
    name = name[:64]
    return name if name.isprintable() else ascii(name)


def _asks(value: Any) -> bool:
    return bytes(value) not in _UNASKED_JSON if isinstance(value, msgspec.Raw) else value not in _UNASKED


def effort_args(effort: str | None, field: str, warnings: list[str]) -> dict[str, Any]:
    """How long to think, as template arguments; ``warnings`` gets a line if the word is not known."""
    if effort is None:
        return {}
    if effort not in _EFFORT:
        warnings.append(f"{field} '{_short(effort)}' was passed over: it is not known here")
    return dict(_EFFORT.get(effort, {}))
