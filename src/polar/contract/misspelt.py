"""Why: that a name is unknown is half an answer. What a user writes is checked against a struct, and the struct knows
which names there are.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec
from msgspec import inspect

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$(?P<path>.*)`)?")
_STEP = re.compile(r"\.(\w+)|\[[^]]*\]")


def explained(error: msgspec.ValidationError, kind: Any) -> str:
    """The error's own line; where a name is unknown, with the one that was probably meant, else those there are.

    Args:
        kind: the type that the data was checked against.
    """
    found = _UNKNOWN.fullmatch(str(error))
    names = _names(inspect.type_info(kind), found["path"] or "") if found else []
    if not found or not names:
        return str(error)
    near = difflib.get_close_matches(found["name"], names, n=1)
    return f"{error}: did you mean {near[0]}?" if near else f"{error}: there are {', '.join(names)}"


def _names(kind: inspect.Type, path: str) -> list[str]:
    """The fields of the struct at this path, such as ``.engines[0]``; none where it leads to several."""
    for step in _STEP.finditer(path):
        struct = _only(kind)
        if step[1] is not None and isinstance(struct, inspect.StructType):
            kind = next((field.type for field in struct.fields if field.encode_name == step[1]), struct)
        elif isinstance(struct, inspect.DictType):
            kind = struct.value_type
        elif isinstance(struct, inspect.VarTupleType | inspect.ListType):
            kind = struct.item_type
        else:
            return []
    struct = _only(kind)
    return [field.encode_name for field in struct.fields] if isinstance(struct, inspect.StructType) else []


def _only(kind: inspect.Type) -> inspect.Type:
    """What may be there beside ``None``."""
    if isinstance(kind, inspect.UnionType):
        kinds = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
        return kinds[0] if len(kinds) == 1 else kind
    return kind
