"""Triton's classification extension: an output's largest values as strings "value:index", largest first."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core import Signature, TensorSpec
from ..dtypes import BY_TORCH, Array
from ..http import BadRequest

MAX_CLASSES = 1 << 14
"""Maximum number of classes of all rows of a request: each is a string that is made by itself."""
BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class TopClasses:
    """The classes of an output, in place of its array."""

    texts: tuple[str, ...]
    shape: tuple[int, ...]

    @cached_property
    def data(self) -> bytes:
        """Return the strings in the protocol's binary format, each after its length."""
        return b"".join(_LENGTH.pack(len(text)) + text.encode() for text in self.texts)

    def tobytes(self) -> bytes:
        """Return `data`, like an array."""
        return self.data

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of `data`."""
        return len(self.data)

    @property
    def size(self) -> int:
        """Return the number of strings."""
        return len(self.texts)


def class_count(value: object, output: str) -> int:
    """Return the requested number of classes; 0 for none.

    Raises:
        BadRequest: It is not a number of classes.
    """
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < 2**31:
        raise BadRequest(400, f"the parameter classification of output '{output[:64]}' must be a number of classes")
    return value


def require_few_classes(counts: Mapping[str, int], signature: Signature, rows: int) -> None:
    """Raise BadRequest if outputs have no classes, or if there are too many of them."""
    for name, count in counts.items():
        spec = signature.outputs[name]
        kind = BY_TORCH[spec.dtype].open
        if kind in ("FP16", "BF16", "BOOL"):
            raise BadRequest(400, f"class result not available for output '{name}' due to unsupported type '{kind}'")
        known = math.prod(size for size in spec.shape[1:] if size is not None) if None not in spec.shape[1:] else count
        if min(count, known) * rows > MAX_CLASSES:
            raise BadRequest(
                400,
                f"a request may ask for {MAX_CLASSES} classes, but got {min(count, known)} of each of {rows} rows for "
                f"output '{name}'; ask for fewer, or for the output itself",
            )


def top_classes(array: Array, count: int) -> TopClasses:
    """Return the classes with the largest values of each row, at most as many as there are.

    >>> top_classes(np.array([[0.5, 2.0, 1.0]], np.float32), 2)
    TopClasses(texts=('2.000000:1', '1.000000:2'), shape=(1, 2))
    """
    rows = array.reshape(len(array), -1)
    count = min(count, rows.shape[1])
    # NaN sorts last, and of equal values the first comes first.
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    is_float = array.dtype.kind == "f"
    texts = [
        f"{value:.6f}:{index}" if is_float else f"{value}:{index}"
        for row, indices in zip(rows, order, strict=True)
        for value, index in zip(row[indices].tolist(), indices.tolist(), strict=True)
    ]
    return TopClasses(tuple(texts), (len(rows), count))


def datatype(array: Array | TopClasses, spec: TensorSpec) -> str:
    """Return the protocol's name of the type in which an output is sent."""
    return BYTES if isinstance(array, TopClasses) else BY_TORCH[spec.dtype].open
