"""Traces as Parquet: token columns as typed lists, everything nested as a JSON string.

JSON strings, because messages and tools have no fixed shape and a nested Parquet schema would be guessed from
the first rows and break on the next file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from polar.contract.arrays import to_json
from polar.contract.result import Trace
from polar.trajectories.rows import ARRAY_COLUMNS, JSON_COLUMNS, LIST_COLUMNS, PLAIN_COLUMNS, nested

TOKENS_PER_GROUP = 4_000_000
ROWS_PER_GROUP = 1024

_SCALARS = {str: pa.string(), int: pa.int32(), float: pa.float64()}
_ARRAYS = {"loss_mask": pa.int8(), "response_logprobs": pa.float32()}

SCHEMA = pa.schema(
    [(name, _SCALARS[kind]) for name, kind in PLAIN_COLUMNS.items()]
    + [(name, pa.list_(_ARRAYS.get(name, pa.int32()))) for name in ARRAY_COLUMNS]
    + [(name, pa.string()) for name in JSON_COLUMNS]
    + [(name, pa.list_(pa.string())) for name in LIST_COLUMNS]
)
"""The columns of a traces file."""


def write_parquet(rows: Iterable[tuple[dict[str, Any], Trace]], file: BinaryIO) -> int:
    """Write rows as they come, in row groups of bounded size; returns how many.

    Args:
        rows: the plain columns of each trace, and the trace.
    """
    count = 0
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        group: list[tuple[dict[str, Any], Trace]] = []
        tokens = 0
        for row in rows:
            group.append(row)
            tokens += len(row[1].prompt_ids) + len(row[1].response_ids)
            count += 1
            if tokens >= TOKENS_PER_GROUP or len(group) >= ROWS_PER_GROUP:
                writer.write_table(_table(group))
                group, tokens = [], 0
        if group:
            writer.write_table(_table(group))
    return count


def _table(group: list[tuple[dict[str, Any], Trace]]) -> Any:
    columns: dict[str, Any] = {name: [plain[name] for plain, _ in group] for name in PLAIN_COLUMNS}
    for name in ARRAY_COLUMNS:
        columns[name] = _lists([getattr(trace, name) for _, trace in group], SCHEMA.field(name).type)
    values = [nested(trace) for _, trace in group]
    for name in JSON_COLUMNS:
        columns[name] = [to_json(value[name]).decode() for value in values]
    for name in LIST_COLUMNS:
        columns[name] = [value[name] for value in values]
    return pa.table(columns, schema=SCHEMA)


def _lists(arrays: list[Any], kind: Any) -> Any:
    """A list column from arrays, without a Python object per token."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    values = np.concatenate(arrays).astype(kind.value_type.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind)
