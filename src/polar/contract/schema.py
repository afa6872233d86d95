"""JSON schemas of what others read and write. ``docs/schema`` has them as files."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polar.contract.result import SessionResult, Trace
from polar.contract.task import TaskRequest

PUBLISHED = (TaskRequest, Trace, SessionResult)


def json_schema(kind: type) -> dict[str, Any]:
    """The JSON schema (2020-12) of a contract type."""
    return msgspec.json.schema(kind, schema_hook=_arrays)


def _arrays(kind: Any) -> dict[str, Any]:
    if kind is np.ndarray:
        return {"type": "array", "items": {"type": "number"}}
    raise TypeError(f"{kind} has no JSON schema")
