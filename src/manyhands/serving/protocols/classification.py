"""Triton's classification extension: an output's largest values as strings "value:index", largest first."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...core import Signature, TensorSpec
from ..dtypes import BY_TORCH, Array
from ..http import BadRequest
from ..texts import Strings

MAX_CLASSES = 1 << 14
"""Maximum number of classes of all rows of a request: each is a string that is made by itself."""
MAX_RANKED = 1 << 22
"""Maximum number of values of an output of which the largest are found: they are sorted."""
BYTES = "BYTES"


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
        if kind in ("FP16", "BF16", "BOOL", BYTES):
            raise BadRequest(400, f"class result not available for output '{name}' due to unsupported type '{kind}'")
        known = math.prod(size for size in spec.shape[1:] if size is not None) if None not in spec.shape[1:] else count
        if min(count, known) * rows > MAX_CLASSES:
            raise BadRequest(
                400,
                f"a request may ask for {MAX_CLASSES} classes, but got {min(count, known)} of each of {rows} rows for "
                f"output '{name}'; ask for fewer, or for the output itself",
            )


def top_classes(array: Array, count: int) -> Strings:
    """Return the classes with the largest values of each row, at most as many as there are.

    A large array takes long, so it needs a thread of its own.

    Raises:
        BadRequest: The array has too many values.

    >>> top_classes(np.array([[0.5, 2.0, 1.0]], np.float32), 2)
    Strings(items=(b'2.000000:1', b'1.000000:2'), shape=(1, 2))
    """
    if array.size > MAX_RANKED:
        raise BadRequest(
            400,
            f"classes can be found in an output of at most {MAX_RANKED} values, but got {array.size}; send fewer rows, "
            "or ask for the output itself",
        )
    rows = array.reshape(len(array), math.prod(array.shape[1:]))
    count = min(count, rows.shape[1])
    # NaN sorts last, and of equal values the first comes first.
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    is_float = array.dtype.kind == "f"
    texts = [
        f"{value:.6f}:{index}" if is_float else f"{value}:{index}"
        for row, indices in zip(rows, order, strict=True)
        for value, index in zip(row[indices].tolist(), indices.tolist(), strict=True)
    ]
    return Strings(tuple(text.encode() for text in texts), (len(rows), count))


def datatype(array: Array | Strings, spec: TensorSpec) -> str:
    """Return the protocol's name of the type in which an output is sent."""
    return BYTES if isinstance(array, Strings) else BY_TORCH[spec.dtype].open
