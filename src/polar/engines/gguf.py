"""Just enough of the GGUF format to unpack a small model: metadata, Q4_1, Q8_0 and F32 tensors.

Small models reach package registries as GGUF files. Reading one takes a few pages of format and gives what
the embedded engine can run and train; a general reader spends many seconds on a vocabulary.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class GGUFError(ValueError):
    """The file is no GGUF file, or uses what is not read here."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: int
    offset: int


class GGUF:
    """A GGUF file in memory.

    Args:
        data: the whole file.

    Raises:
        GGUFError: not a GGUF file of version 2 or 3.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        magic, version = self._unpack("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise GGUFError("no GGUF file of version 2 or 3")
        tensors, fields = self._unpack("<QQ")
        self.fields: dict[str, Any] = {self._string(): self._value(self._unpack("<I")[0]) for _ in range(fields)}
        """The metadata: scalars, strings and lists by key."""
        self._tensors = dict(self._tensor() for _ in range(tensors))
        alignment = self.fields.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in file order."""
        return list(self._tensors)

    def tensor(self, name: str) -> Array:
        """A tensor as float32, row-major: the last dimension is the one that lies together.

        Raises:
            GGUFError: it is quantized in a way that is not read here.
        """
        tensor = self._tensors[name]
        try:
            block, size, decode = _KINDS[tensor.kind]
        except KeyError:
            raise GGUFError(f"tensor {name} has the unknown type {tensor.kind}") from None
        count = int(np.prod(tensor.shape))
        start = self._start + tensor.offset
        raw = np.frombuffer(self._data, np.uint8, count // block * size, start)
        return decode(raw.reshape(-1, size)).reshape(tensor.shape)

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        text = self._data[self._at : self._at + length].decode("utf-8")
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._unpack("<IQ")
            if inner in _SCALARS:
                return list(self._unpack(f"<{count}{_SCALARS[inner]}"))
            return [self._value(inner) for _ in range(count)]
        if kind in _SCALARS:
            return self._unpack(f"<{_SCALARS[kind]}")[0]
        raise GGUFError(f"unknown metadata type {kind}")

    def _tensor(self) -> tuple[str, _Tensor]:
        name = self._string()
        (dimensions,) = self._unpack("<I")
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, _Tensor(tuple(reversed(shape)), kind, offset)


def _f32(blocks: npt.NDArray[np.uint8]) -> Array:
    return blocks.view("<f4").astype(np.float32)


def _q8_0(blocks: npt.NDArray[np.uint8]) -> Array:
    """A float16 scale, then 32 signed bytes."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8) * scale


def _q4_1(blocks: npt.NDArray[np.uint8]) -> Array:
    """A float16 scale, a float16 minimum, then 32 nibbles: the low ones of 16 bytes, then the high ones."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    lowest = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    out = np.empty((len(blocks), 32), dtype=np.float32)
    np.multiply(blocks[:, 4:] & 0x0F, scale, out=out[:, :16])
    np.multiply(blocks[:, 4:] >> 4, scale, out=out[:, 16:])
    out += lowest
    return out


# type number: (values in a block, bytes of a block, decoder)
_KINDS: dict[int, tuple[int, int, Callable[[npt.NDArray[np.uint8]], Array]]] = {
    0: (1, 4, _f32),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
