"""Fast path for the common request `{"instances": [[...], ...]}`: parsed into an array without an object per number.

Any other or invalid text gives None, and takes the regular path, which reports errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import simdjson

from ...core import Signature
from ..dtypes import BY_TORCH, Array

_parser = simdjson.Parser()
SMALLEST = 1024
"""Minimum bytes of a text for which this path pays."""
LARGEST = 1 << 20
"""Maximum bytes of a text, which take two milliseconds; a larger one would delay other requests."""


def fast_rows(text: bytes, signature: Signature) -> Array | None:
    """Return the rows of a text for a single floating-point input, or None.

    >>> from manyhands.core import TensorSpec
    >>> signature = Signature({"x": TensorSpec("float32", (None, 2))}, {})
    >>> fast_rows(b'{"instances": [[1, 2.5], [3, 4]]}', signature)
    array([[1. , 2.5],
           [3. , 4. ]], dtype=float32)
    >>> fast_rows(b'{"instances": [[1, 2, 3], [4]]}', signature)
    """
    if len(signature.inputs) != 1:
        return None
    (spec,) = signature.inputs.values()
    kind, shape = BY_TORCH[spec.dtype].numpy, spec.shape[1:]
    if kind.kind != "f" or spec.dtype == "bfloat16" or None in shape or not shape:
        return None
    found: Any = None
    value: Any = None
    try:
        value = _parser.parse(text)
        if len(value) == 1:
            found = value["instances"]
            if len(found) and all(_has_shape(row, shape) for row in found) and _is_flat(text, len(found), shape):
                numbers = np.frombuffer(found.as_buffer(of_type="d"), np.float64)
                with np.errstate(over="ignore"):
                    return numbers.astype(kind).reshape(len(found), *(size or 0 for size in shape))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        pass
    finally:
        # The parser can be reused only when none of its results is referenced.
        del found, value
    return None


def _is_flat(text: bytes, num_rows: int, shape: tuple[int | None, ...]) -> bool:
    """Return whether the innermost lists contain no lists, which would be flattened silently."""
    num_lists = num = num_rows
    for size in shape[:-1]:
        num *= size or 0
        num_lists += num
    return text.count(b"[") == 1 + num_lists


def _has_shape(value: Any, shape: tuple[int | None, ...]) -> bool:
    return len(value) == shape[0] and (len(shape) == 1 or all(_has_shape(each, shape[1:]) for each in value))
