"""Tensors of strings: object arrays of `bytes`, made of what clients send and written as they expect it.

A string is an object of its own, so their number is limited, for a request and for a batch.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .dtypes import Array, Kind

MAX_TEXTS = 1 << 14
"""Maximum number of strings of a request, and of a batch unless one row has more."""
OBJECT_BYTES = 64
"""Bytes that a string takes in memory beside its own."""
MAX_DEPTH = 32
"""Maximum depth of the nested lists of a request."""
_LENGTH = struct.Struct("<I")
_SMALLEST_WIDTH = 4096
_ENCODED = {"b64"}


def as_array(items: Iterable[bytes], shape: Sequence[int]) -> Array:
    """Return strings as an array of objects.

    >>> as_array([b"a", b"b\\0"], (2, 1)).tolist()
    [[b'a'], [b'b\\x00']]
    """
    listed = list(items)
    return np.fromiter(listed, object, len(listed)).reshape(shape)


def is_text(array: Any) -> bool:
    """Return whether an array has strings."""
    return isinstance(array, np.ndarray) and array.dtype.hasobject


def text_bytes(array: Array) -> int:
    """Return the bytes of an array's strings, and of the objects that hold them; 0 for numbers."""
    return sum(map(len, array.flat)) + OBJECT_BYTES * array.size if is_text(array) else 0


def width(array: Array) -> int:
    """Return the space for the strings of one row: the longest row's bytes, rounded up so that many rows share it.

    >>> width(as_array([b"a", b"bc"], (2,))), width(as_array([b"a" * 5000], (1,)))
    (4096, 16384)
    """
    rows = array.reshape(len(array), -1)
    most = max((sum(map(len, row)) for row in rows), default=0)
    found = _SMALLEST_WIDTH
    while found < most:
        found *= 4
    return found


def from_lists(values: Any, rank: int, kind: Kind) -> Array:
    """Return nested lists of strings as an array of `rank` dimensions.

    An object {"b64": "..."} is a string in base64, as for TensorFlow Serving.

    Raises:
        ValueError, TypeError: The lists are ragged, or hold something else.
    """
    shape: list[int] = []
    level = [values]
    for _ in range(rank):
        if not all(isinstance(one, list) for one in level):
            raise TypeError("strings must be in nested lists")
        sizes = {len(one) for one in level}
        if len(sizes) > 1:
            raise ValueError("lists must not be ragged")
        shape.append(sizes.pop() if sizes else 0)
        level = [item for one in level for item in one]
        if len(level) > MAX_TEXTS:
            raise TooManyTexts
    return as_array((as_bytes(item, kind) for item in level), shape)


class TooManyTexts(ValueError):
    """Raised for more strings than a limit."""

    def __init__(self, limit: int = MAX_TEXTS) -> None:
        super().__init__(f"a message may have {limit} strings")


def flattened(values: Any) -> list[Any]:
    """Return the elements of nested lists; raises ValueError if they are nested too deep or too many."""
    level = values if isinstance(values, list) else [values]
    for _ in range(MAX_DEPTH):
        if len(level) > MAX_TEXTS:
            raise TooManyTexts
        if not any(isinstance(one, list) for one in level):
            return level
        level = [item for one in level for item in (one if isinstance(one, list) else [one])]
    raise ValueError("lists are nested too deep")


def as_bytes(value: Any, kind: Kind) -> bytes:
    """Return one string of a JSON text; raises TypeError or ValueError for something else."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and value.keys() == _ENCODED and isinstance(value["b64"], str):
        try:
            return checked(base64.b64decode(value["b64"], validate=True), kind)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
    raise TypeError("elements must be strings")


def checked(value: bytes, kind: Kind) -> bytes:
    """Return a string; raises ValueError if it must be UTF-8 and is not."""
    if kind.torch == "string":
        value.decode()
    return value


def pack(items: Iterable[bytes]) -> bytes:
    """Return strings in the binary format of the Open Inference Protocol: each after its length in four bytes.

    >>> pack([b"ab", b""])
    b'\\x02\\x00\\x00\\x00ab\\x00\\x00\\x00\\x00'
    """
    return b"".join(part for item in items for part in (_LENGTH.pack(len(item)), item))


def unpack(raw: memoryview | bytes, num: int, kind: Kind, limit: int = MAX_TEXTS) -> list[bytes]:
    """Return the `num` strings in data of the binary format; raises ValueError if it has another number of them.

    >>> from manyhands.serving.dtypes import BY_TORCH
    >>> unpack(pack([b"ab", b""]), 2, BY_TORCH["bytes"])
    [b'ab', b'']
    """
    if num > limit:
        raise TooManyTexts(limit)
    data, at, found = memoryview(raw), 0, []
    for _ in range(num):
        if len(data) - at < _LENGTH.size:
            raise ValueError("a string's length is missing")
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if size > len(data) - at:
            raise ValueError("a string is longer than the data")
        found.append(checked(bytes(data[at : at + size]), kind))
        at += size
    if at != len(data):
        raise ValueError("there are more bytes than strings")
    return found


def as_json(value: bytes, kind: Kind) -> Any:
    """Return one string as a value of a JSON text: text, or base64 for any bytes, as TensorFlow Serving writes it."""
    return value.decode() if kind.torch == "string" else {"b64": base64.b64encode(value).decode()}


@dataclass(frozen=True)
class Strings:
    """Strings of a response, in place of an array."""

    items: tuple[bytes, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Array) -> Strings:
        """Return the strings of an array of objects."""
        return cls(tuple(array.flat), array.shape)

    @property
    def texts(self) -> list[str]:
        """The strings as text."""
        return [item.decode() for item in self.items]

    @cached_property
    def data(self) -> bytes:
        """The strings in the binary format."""
        return pack(self.items)

    def tobytes(self) -> bytes:
        """Return `data`, like an array."""
        return self.data

    @property
    def nbytes(self) -> int:
        """The number of bytes of `data`."""
        return len(self.data)

    @property
    def size(self) -> int:
        """The work of writing the strings, as a number of numbers."""
        return len(self.items) + sum(map(len, self.items)) // 8


def as_contents(array: Array) -> Array | Strings:
    """Return an output so that `data`, `nbytes`, `shape` and `size` describe what is sent: never pointers."""
    return Strings.of(array) if is_text(array) else np.ascontiguousarray(array)


@dataclass(frozen=True)
class TextRegion:
    """Shared memory for the strings of a batch: their lengths, then all their bytes."""

    lengths: Array
    data: Array
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes that are reserved."""
        return int(self.lengths.nbytes + self.data.nbytes)

    def write(self, items: Sequence[bytes]) -> None:
        """Write all strings, in order."""
        joined = b"".join(items)
        self.lengths[:] = [len(item) for item in items]
        self.data[: len(joined)] = np.frombuffer(joined, np.uint8)

    def read(self, convert: Callable[[bytes], Any] = bytes) -> Array:
        """Return the strings as an array; raises ValueError if their lengths do not fit into the region."""
        lengths = self.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        if total > len(self.data):
            raise ValueError("the strings of a batch are longer than their memory")
        joined, starts = self.data[:total].tobytes(), (ends - lengths).tolist()
        found = [convert(joined[start:end]) for start, end in zip(starts, ends.tolist(), strict=True)]
        return np.fromiter(found, object, len(found)).reshape(self.shape)
