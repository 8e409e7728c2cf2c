"""JSON texts of answers in small pieces, between which the event loop handles other requests.

NaN and infinite numbers are written as `NaN`, `Infinity` and `-Infinity`, as TensorFlow Serving and Triton do, although
JSON itself has no such numbers. Strict parsers refuse them; clients that need strict JSON ask for binary tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from ..dtypes import Array, Kind, num_items, to_numbers
from ..texts import as_json, is_text, text_bytes

PIECE = 8192
"""Maximum numbers, or empty lists, of a piece, which takes less than a millisecond."""
_TOKENS = (b"NaN", b"Infinity", b"-Infinity")


def num_values(array: Array) -> int:
    """Return the number of values of an array, as a measure of the work of writing it; 8 bytes of strings are one."""
    return num_items(array.shape) + (text_bytes(array) // 8 if is_text(array) else 0)


def array_pieces(array: Array, kind: Kind) -> Iterator[bytes]:
    """Yield the JSON text of an array as nested lists.

    >>> from manyhands.serving.dtypes import BY_TORCH
    >>> b"".join(array_pieces(np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32), BY_TORCH["float32"]))
    b'[[1.5,NaN],[Infinity,-Infinity]]'
    """
    num = num_items(array.shape)
    if (num <= PIECE and num_values(array) <= PIECE) or not array.ndim or not len(array):
        yield _dump_array(array, kind)
        return
    if kind.is_text:
        for number in range(len(array)):
            yield b"," if number else b"["
            yield from array_pieces(_row(array, number), kind)
        yield b"]"
        return
    width = num // len(array)
    if width > PIECE:
        for number, row in enumerate(array):
            yield b"," if number else b"["
            yield from array_pieces(row, kind)
    else:
        step = PIECE // width
        for start in range(0, len(array), step):
            yield (b"," if start else b"[") + _dump_array(array[start : start + step], kind)[1:-1]
    yield b"]"


def row_pieces(arrays: Mapping[str, Array], kinds: Mapping[str, Kind]) -> Iterator[bytes]:
    """Yield the JSON text of a list with an object for each row of some arrays.

    >>> from manyhands.serving.dtypes import BY_TORCH
    >>> arrays = {"a": np.array([1, 2]), "b": np.array([0.5, np.nan])}
    >>> b"".join(row_pieces(arrays, {"a": BY_TORCH["int64"], "b": BY_TORCH["float64"]}))
    b'[{"a":1,"b":0.5},{"a":2,"b":NaN}]'
    """
    num = len(next(iter(arrays.values())))
    width = sum(num_values(array) // max(num, 1) for array in arrays.values())
    if width > PIECE:
        for row in range(num):
            yield b",{" if row else b"[{"
            for number, (name, array) in enumerate(arrays.items()):
                yield (b"," if number else b"") + orjson.dumps(name) + b":"
                yield from array_pieces(_row(array, row), kinds[name])
            yield b"}"
        yield b"]" if num else b"[]"
        return
    step = PIECE // max(width, 1)
    yield b"["
    for start in range(0, num, step):
        columns = {name: to_numbers(array[start : start + step], kinds[name]) for name, array in arrays.items()}
        lists = {
            name: text_lists(column, kinds[name]) if kinds[name].is_text else column.tolist()
            for name, column in columns.items()
        }
        rows = [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]
        yield (b"," if start else b"") + _dump(rows, all(map(_is_finite, columns.values())))[1:-1]
    yield b"]"


def list_pieces(values: Iterable[Any]) -> Iterator[bytes]:
    """Yield the JSON text of a list of values, a few at a time; each must have few numbers.

    >>> b"".join(list_pieces([0.5, math.nan, ["a"]]))
    b'[0.5,NaN,["a"]]'
    """
    yield b"["
    for number, value in enumerate(values):
        yield (b"," if number else b"") + json.dumps(value, separators=(",", ":")).encode()
    yield b"]"


def class_pieces(scores: Array) -> Iterator[bytes]:
    """Yield the JSON text of the classes of each row, as pairs of the class and its score.

    >>> b"".join(class_pieces(np.array([[0.5, 2.0]], np.float32)))
    b'[[["0",0.5],["1",2.0]]]'
    """
    yield b"["
    for number, row in enumerate(scores):
        yield b",[" if number else b"["
        for start in range(0, len(row), PIECE):
            some = row[start : start + PIECE].tolist()
            pairs = [(str(start + place), float(score)) for place, score in enumerate(some)]
            yield (b"," if start else b"") + json.dumps(pairs, separators=(",", ":")).encode()[1:-1]
        yield b"]"
    yield b"]"


def _row(array: Array, row: int) -> Array:
    """Return a row as an array, also if it is a single string."""
    return np.asarray(array[row], object) if is_text(array) else array[row]


def text_lists(array: Array, kind: Kind) -> Any:
    """Return an array of strings as nested lists of JSON values."""
    if array.ndim:
        return [text_lists(_row(array, row), kind) for row in range(len(array))]
    return as_json(array.item(), kind)


def _is_finite(array: Array) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _dump(value: Any, is_finite: bool) -> bytes:
    # Only Python's own encoder supports NaN and Infinity.
    return orjson.dumps(value) if is_finite else json.dumps(value, separators=(",", ":")).encode()


def _dump_array(array: Array, kind: Kind) -> bytes:
    if kind.is_text:
        return orjson.dumps(text_lists(array, kind))
    numbers = to_numbers(array, kind)
    is_finite = _is_finite(numbers)
    if not numbers.ndim:
        return _dump(numbers.tolist(), is_finite)
    if numbers.dtype == np.float16:
        numbers = numbers.astype(np.float64)
    text = orjson.dumps(np.ascontiguousarray(numbers), option=orjson.OPT_SERIALIZE_NUMPY)
    if is_finite:
        return text
    # The encoder writes null for each number that JSON does not have.
    parts, others = text.split(b"null"), numbers[~np.isfinite(numbers)].tolist()
    tokens = [_TOKENS[0 if math.isnan(one) else 1 if one > 0 else 2] for one in others]
    return b"".join(part + token for part, token in zip(parts, [*tokens, b""], strict=True))
