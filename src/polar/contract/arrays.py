"""Token arrays: int32 ids and float32 logprobs, in memory, as bytes and as JSON lists.

Inside Polar a token sequence is a one-dimensional numpy array, so that 100,000 tokens are 400 kB and
not a list of Python objects. Over the wire it is a JSON list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

T = TypeVar("T")

NO_IDS: Ids = np.zeros(0, dtype=np.int32)
NO_FLOATS: Floats = np.zeros(0, dtype=np.float32)
NO_IDS.setflags(write=False)
NO_FLOATS.setflags(write=False)


def ids(values: Iterable[int]) -> Ids:
    """Token ids from any iterable of integers (int32, shape [n])."""
    return np.fromiter(values, dtype=np.int32)


def floats(values: Iterable[float]) -> Floats:
    """Logprobs or other scalars from any iterable of numbers (float32, shape [n])."""
    return np.fromiter(values, dtype=np.float32)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading ids of ``a`` and ``b`` are equal."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _to_json(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _from_json(kind: Any, value: Any) -> Any:
    if kind == Ids or kind is Ids:
        return np.asarray(value, dtype=np.int32)
    if kind == Floats or kind is Floats:
        return np.asarray(value, dtype=np.float32)
    raise TypeError(f"cannot decode {kind}")


_encoder = msgspec.json.Encoder(enc_hook=_to_json)


def to_json(value: Any) -> bytes:
    """JSON bytes of any contract object; arrays become lists."""
    return _encoder.encode(value)


def from_json(data: bytes | str, kind: type[T]) -> T:
    """A contract object from its JSON.

    Raises:
        msgspec.ValidationError: the data does not fit; the message names the field.
    """
    return msgspec.json.decode(data, type=kind, dec_hook=_from_json)


def to_plain(value: Any) -> Any:
    """Dicts, lists and scalars of any contract object (what ``json.dumps`` takes)."""
    return msgspec.to_builtins(value, enc_hook=_to_json)
