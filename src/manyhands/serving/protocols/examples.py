"""TensorFlow's examples: rows as named features, answered with classes and scores or with values.

The signature maps features to inputs: a feature per input name, with as many numbers as a row has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import RequestRefused, Signature, TensorSpec
from ..dtypes import BY_TORCH, Array, Kind, from_numbers, to_numbers
from ..http import BadRequest
from ..texts import MAX_TEXTS, TooManyTexts, as_array, as_bytes, checked
from .protocol import refusing

Features = Mapping[str, Sequence[Any]]


def rows_of(examples: Sequence[Features], context: Features, signature: Signature, most: int) -> dict[str, Array]:
    """Return the arrays of some examples, of at most `most` numbers; features in the context apply to all of them.

    The context makes the arrays larger than their message, so their size is checked before they are made.
    """
    if not examples:
        raise BadRequest(400, "Input is empty.")
    num = len(examples) * sum(math.prod(size or 0 for size in spec.shape[1:]) for spec in signature.inputs.values())
    if num > most:
        raise BadRequest(413, f"examples may have {most} numbers together with their context, but got {num}")
    return {name: _column(name, spec, examples, context) for name, spec in signature.inputs.items()}


def scores_of(outputs: Mapping[str, Array], signature: Signature) -> Array:
    """Return the scores of the classes of each row; a class is named by its number."""
    scores = _only(outputs, signature, "scores")
    if scores.ndim != 2:
        raise RequestRefused(
            "FAILED_PRECONDITION",
            f"to classify, a row's output must be its scores, but it has the shape {scores.shape}",
        )
    return scores


def values_of(outputs: Mapping[str, Array], signature: Signature) -> list[float]:
    """Return the value of each row."""
    values = _only(outputs, signature, "outputs")
    if math.prod(values.shape[1:]) != 1:
        raise RequestRefused(
            "FAILED_PRECONDITION", f"to regress, a row's output must be one number, but it has the shape {values.shape}"
        )
    return [float(value) for value in values.reshape(-1)]


def _column(name: str, spec: TensorSpec, examples: Sequence[Features], context: Features) -> Array:
    shape = spec.shape[1:]
    if any(size is None for size in shape):
        raise RequestRefused("FAILED_PRECONDITION", f"input '{name}' has no fixed shape, so examples cannot fill it")
    num = math.prod(size or 0 for size in shape)
    rows = []
    for example in examples:
        values = example.get(name, context.get(name))
        if values is None:
            raise BadRequest(400, f"Feature: {name} (data type: {spec.dtype}) is required but could not be found.")
        if len(values) != num:
            raise BadRequest(
                400,
                f"Key: {name}.  Number of values != expected.  values size: {len(values)} but output shape: [{num}]",
            )
        rows.append(list(values))
    kind = BY_TORCH[spec.dtype]
    with refusing(f"Key: {name}.  Data types don't match. Expected type: {spec.dtype}"):
        array = _texts(rows, kind) if kind.is_text else from_numbers(rows, kind)
    array = array.reshape(len(examples), num)
    return array.reshape(len(examples), *(size or 0 for size in shape))


def _texts(rows: Sequence[Sequence[Any]], kind: Kind) -> Array:
    """Return strings of JSON texts, or bytes of messages."""
    values = [value for row in rows for value in row]
    if len(values) > MAX_TEXTS:
        raise TooManyTexts
    items = [checked(value, kind) if isinstance(value, bytes) else as_bytes(value, kind) for value in values]
    return as_array(items, (len(items),))


def _only(outputs: Mapping[str, Array], signature: Signature, name: str) -> Array:
    """Return the output of a name, or the only one, as floats."""
    if name not in outputs and len(outputs) != 1:
        raise RequestRefused(
            "FAILED_PRECONDITION", f"of several outputs one must be called '{name}', but got {', '.join(outputs)}"
        )
    found = name if name in outputs else next(iter(outputs))
    if BY_TORCH[signature.outputs[found].dtype].is_text:
        raise RequestRefused("FAILED_PRECONDITION", f"the output '{found}' must be numbers, but it has strings")
    return np.asarray(to_numbers(outputs[found], BY_TORCH[signature.outputs[found].dtype]))
