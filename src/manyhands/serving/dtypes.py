"""Kinds of elements: what torch, numpy, the Open Inference Protocol and TensorFlow call the same one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import TensorSpec

Array = NDArray[Any]


@dataclass(frozen=True)
class Kind:
    """An element type. numpy has no bfloat16, so its arrays hold the bits as uint16."""

    torch: str
    open: str
    tensorflow: str
    number: int
    """TensorFlow's own, in a TensorProto."""
    numpy: np.dtype[Any]

    @property
    def is_text(self) -> bool:
        """Whether elements are strings."""
        return self.numpy.hasobject

    @property
    def is_bfloat16(self) -> bool:
        """Whether arrays hold bits instead of numbers."""
        return self.torch == "bfloat16"


KINDS = tuple(
    Kind(torch, ours, tensorflow, number, np.dtype(numpy))
    for torch, ours, tensorflow, number, numpy in (
        ("float32", "FP32", "DT_FLOAT", 1, "<f4"),
        ("float64", "FP64", "DT_DOUBLE", 2, "<f8"),
        ("int32", "INT32", "DT_INT32", 3, "<i4"),
        ("uint8", "UINT8", "DT_UINT8", 4, "u1"),
        ("int16", "INT16", "DT_INT16", 5, "<i2"),
        ("int8", "INT8", "DT_INT8", 6, "i1"),
        ("int64", "INT64", "DT_INT64", 9, "<i8"),
        ("bool", "BOOL", "DT_BOOL", 10, "?"),
        ("bfloat16", "BF16", "DT_BFLOAT16", 14, "<u2"),
        ("uint16", "UINT16", "DT_UINT16", 17, "<u2"),
        ("float16", "FP16", "DT_HALF", 19, "<f2"),
        ("uint32", "UINT32", "DT_UINT32", 22, "<u4"),
        ("uint64", "UINT64", "DT_UINT64", 23, "<u8"),
    )
)
TEXTS = tuple(Kind(name, "BYTES", "DT_STRING", 7, np.dtype(object)) for name in ("bytes", "string"))
"""Strings of any bytes, and strings of UTF-8: arrays hold objects of `bytes`. Only predictors in Python have them."""
BY_TORCH = {kind.torch: kind for kind in (*KINDS, *TEXTS)}
BY_OPEN = {kind.open: kind for kind in (*KINDS, *TEXTS)}
BY_NUMBER = {kind.number: kind for kind in (*KINDS, *TEXTS)}


def from_numbers(values: Any, kind: Kind) -> Array:
    """Return nested lists of numbers as an array; raises ValueError, TypeError or OverflowError if they do not fit.

    >>> from_numbers([[1, 2.5]], BY_TORCH["bfloat16"])
    array([[16256, 16416]], dtype=uint16)
    >>> from_numbers([1, 2**64 - 1], BY_TORCH["uint64"])
    array([                   1, 18446744073709551615], dtype=uint64)
    """
    if kind.is_bfloat16:
        return _bits(_floats(values, np.dtype(np.float32)))
    if kind.numpy.kind == "f":
        return _floats(values, kind.numpy)
    if str in _types(values):
        # numpy would make an array of texts, each as wide as the longest one.
        raise TypeError(f"elements must be {kind.torch}")
    found = np.array(values)
    if kind.torch == "uint64" and found.dtype.kind == "f":
        found = _beyond_int64(values)
    if not found.size:
        return found.astype(kind.numpy)
    both_integral = found.dtype.kind in "iu" and kind.numpy.kind in "iu"
    if found.dtype.kind != kind.numpy.kind and not both_integral:
        raise TypeError(f"elements must be {kind.torch}")
    if both_integral:
        bounds = np.iinfo(kind.numpy)
        if found.min() < bounds.min or found.max() > bounds.max:
            raise OverflowError(f"elements must be {kind.torch}")
    return found.astype(kind.numpy)


def from_raw(raw: memoryview | bytes, dtype: np.dtype[Any]) -> Array:
    """Return raw little-endian elements as an array, without copying unless they are bools.

    A bool of another byte than 0 and 1 is undefined behaviour in compiled code, which may compute an index with it.

    >>> from_raw(b"\\x00\\x02\\xff", np.dtype(bool)).view(np.uint8)
    array([0, 1, 1], dtype=uint8)
    """
    return np.frombuffer(raw, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(raw, dtype)


def to_numbers(array: Array, kind: Kind) -> Array:
    """Return an array of numbers: the bits of bfloat16 become float32, which represents all of them exactly."""
    return (array.astype(np.uint32) << 16).view(np.float32) if kind.is_bfloat16 else array


def num_items(shape: Iterable[int]) -> int:
    """Return the number of values of an array, or of the lists that it has in JSON where these are empty.

    >>> num_items((2, 3)), num_items((1 << 30, 0))
    (6, 1073741824)
    """
    return math.prod(max(1, size) for size in shape)


def fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    """Return whether an array of this shape fits the signature.

    >>> fits((5, 2), TensorSpec("float32", (None, 2)))
    True
    """
    return len(shape) == len(spec.shape) and all(
        want is None or want == have for want, have in zip(spec.shape, shape, strict=True)
    )


def _floats(values: Any, dtype: np.dtype[Any]) -> Array:
    """Return an array of floats; raises TypeError for strings, booleans and null, which numpy would convert."""
    with np.errstate(over="ignore"):
        found = np.array(values, dtype)
    first = values
    for _ in range(found.ndim):
        first = first[0] if first else 0.0
    if isinstance(first, (str, bytes, bool)) or (np.isnan(found).any() and _holds_none(values)):
        raise TypeError("elements must be numbers")
    return found


def _beyond_int64(values: Any) -> Array:
    """Return integers beyond int64 as uint64; numpy would convert them to floats."""
    each = np.array(values, object)
    # Iterating over `flat` fails beyond 32 dimensions.
    if not all(type(value) is int for value in each.reshape(-1)):
        raise TypeError("elements must be uint64")
    return each.astype(np.uint64)


def _types(values: Any) -> set[type]:
    """Return the types of the elements of nested lists, which may be nested deeper than Python can call."""
    level = values if isinstance(values, list) else [values]
    found = set(map(type, level))
    while list in found:
        level = [item for one in level if isinstance(one, list) for item in one]
        found = (found - {list}).union(map(type, level))
    return found


def _holds_none(values: Any) -> bool:
    return any(map(_holds_none, values)) if isinstance(values, list) else values is None


def _bits(array: NDArray[np.float32]) -> Array:
    """Return the upper half of each float32, rounded to the nearest even as torch does; NaN stays NaN."""
    bits = array.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)
