"""Messages between ranks: Python values as MessagePack. Decoding a message never runs code of its sender.

Plain values keep their types: None, numbers, strings, bytes, lists, tuples, dicts, sets, paths, tensors, numpy arrays,
dtypes, and instances of classes that were registered with `message`. Any other object is sent as `Opaque`, a pickle
that the receiver opens explicitly, and only if the job has a key that authenticates the sender.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any, TypeVar

import cloudpickle
import msgspec
import numpy as np
import torch
from torch import Tensor

from ..core import SendError, SettingsError

T = TypeVar("T")

_HEAD = struct.Struct("<Q")
"""The length of the MessagePack part; the bytes of tensors and arrays follow it."""
_ALIGNMENT = 16
_AS_IS = frozenset({type(None), bool, float, str, bytes})
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
"""The range of integers that MessagePack supports."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
}
_ARRAY_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")
"""Names of NumPy dtypes whose bytes are plain values, unlike objects and records; NumPy would accept other texts."""
_INTEGER, _TUPLE, _PAIRS, _SET, _FROZENSET, _COMPLEX, _PATH, _DTYPE, _SIZE = range(9)
_TENSOR, _ARRAY, _SCALAR, _RECORD, _OPAQUE = range(9, 14)

_records: dict[str, type[Any]] = {}
_names: dict[type[Any], tuple[str, list[str]]] = {}
"""The name and the field names of each registered class."""


class InvalidMessage(ValueError):
    """Bytes that are not a message of this version of manyhands."""


def message(kind: type[T]) -> type[T]:
    """Register a dataclass or NamedTuple, so that its instances can be sent; receivers recreate them from their fields.

    >>> @message
    ... @dataclass
    ... class Point:
    ...     x: int
    >>> decode(encode([Point(1)]))
    [Point(x=1)]
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    fields: Any = getattr(kind, "_fields", None) or [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    _records[name], _names[kind] = kind, (name, list(fields))
    return kind


@dataclass(frozen=True)
class Opaque:
    """A pickled object of any type. Opening it runs code of its sender, so the sender must be authenticated.

    >>> Opaque.of(range(3)).open()
    range(0, 3)
    """

    data: bytes = field(repr=False)
    is_authentic: bool = True
    """Whether the message that contained the object was authenticated as sent by a rank of this job."""

    @classmethod
    def of(cls, value: Any) -> Opaque:
        """Pickle a value; the code of classes that the receiver cannot import is included."""
        return cls(cloudpickle.dumps(value))

    def open(self) -> Any:
        """Unpickle and return the object.

        Raises:
            SettingsError: The job has no key, so the pickle may not be from one of its ranks.
        """
        if not self.is_authentic:
            raise SettingsError(
                "objects that are not plain data are only accepted from ranks that share a token",
                got="ranks that were launched without a token",
                remedy="set MANYHANDS_TOKEN to the same secret on all ranks, or send only numbers, strings and tensors",
            )
        return pickle.loads(self.data)


def encode(value: Any) -> bytes:
    """Return a value as the bytes of a message.

    Raises:
        SendError: A part of the value is neither plain data nor of a registered class, or is nested too deeply.

    >>> decode(encode({"shape": (2, 3), 7: [None, 1.5]}))
    {'shape': (2, 3), 7: [None, 1.5]}
    """
    encoder = _MessageEncoder()
    try:
        body = _pack(encoder.plain(value))
    except RecursionError:
        raise SendError(
            "values that ranks exchange must not contain themselves, or be nested hundreds of levels deep",
            got=f"{type(value).__name__} with too many levels",
            remedy="send it in a flat form, without circular references",
        ) from None
    return b"".join((_HEAD.pack(len(body)), body, bytes(-len(body) % _ALIGNMENT), *encoder.buffers))


def is_plain(value: Any) -> bool:
    """Return whether a value can be sent without pickling it.

    >>> is_plain([1, "two"]), is_plain(print)
    (True, False)
    """
    try:
        encode(value)
    except SendError:
        return False
    return True


def decode(data: bytes | memoryview, *, is_authentic: bool = True) -> Any:
    """Return the value of a message.

    Args:
        data: The result of `encode`.
        is_authentic: Whether the message is authenticated as sent by a rank of this job; only then can an `Opaque` in
            it be opened.

    Raises:
        InvalidMessage: The bytes are not a message.
    """
    view = memoryview(data)
    try:
        (length,) = _HEAD.unpack_from(view)
        start = _HEAD.size + length
        decoder = _MessageDecoder(view[start + -length % _ALIGNMENT :], is_authentic)
        return decoder.read(view[_HEAD.size : start])
    except Exception as error:
        raise InvalidMessage(f"{type(error).__name__}: {error}") from None


_pack = msgspec.msgpack.Encoder().encode


def _ext(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(content))


class _MessageEncoder:
    def __init__(self) -> None:
        self.buffers: list[bytes | memoryview] = []
        self._size = 0

    def plain(self, value: Any) -> Any:
        """Convert a value to MessagePack types; tensors and arrays are stored in `buffers`."""
        kind = type(value)
        if kind in _AS_IS:
            return value
        if kind is int:
            return value if _LEAST <= value <= _MOST else _ext(_INTEGER, f"{value:x}")
        if kind is list:
            return self._items(value)
        if kind is dict and set(map(type, value)) <= {str}:
            return {key: self.plain(each) for key, each in value.items()}
        if (known := _names.get(kind)) is not None:
            return _ext(_RECORD, [known[0], {field: self.plain(getattr(value, field)) for field in known[1]}])
        if (write := _WRITERS.get(kind)) is not None:
            return write(self, value)
        if isinstance(value, np.generic):
            return _ext(_SCALAR, self._array(np.asarray(value)))
        raise SendError(
            "values that ranks exchange must be plain data: numbers, strings, lists, tuples, dicts, tensors, arrays",
            got=f"{kind.__module__}.{kind.__qualname__}",
            remedy="send its parts, or wrap it in distributed.messages.Opaque",
        )

    def _items(self, values: Any) -> list[Any]:
        # Long lists of numbers and texts are common, so their elements are not visited one by one in Python.
        kinds = set(map(type, values))
        if kinds <= _AS_IS or (kinds == {int} and min(values) >= _LEAST and max(values) <= _MOST):
            return list(values)
        return [self.plain(each) for each in values]

    def _append_buffer(self, data: memoryview) -> int:
        """Store bytes after the MessagePack part, so that they are copied only once; return their offset there."""
        start = self._size
        self.buffers += [data, bytes(-data.nbytes % _ALIGNMENT)]
        self._size += data.nbytes + -data.nbytes % _ALIGNMENT
        return start

    def _tensor(self, tensor: Tensor) -> list[Any]:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise SendError(
                "tensors that ranks exchange must be dense, with values, and not quantized",
                got=f"a tensor with {tensor.layout} on {tensor.device}",
                remedy="convert it, for example with tensor.to_dense()",
            )
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        data = memoryview(flat.numpy())  # type: ignore[arg-type]
        return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self._append_buffer(data)]

    def _array(self, array: np.ndarray[Any, Any]) -> list[Any]:
        if not _ARRAY_DTYPE.fullmatch(array.dtype.str):
            raise SendError(
                "arrays that ranks exchange must contain numbers or strings",
                got=f"an array of dtype {array.dtype}",
                remedy="convert it, for example with array.astype(float)",
            )
        return [array.dtype.str, list(array.shape), self._append_buffer(memoryview(array.tobytes()))]

    def _opaque(self, value: Opaque) -> list[int]:
        return [self._append_buffer(memoryview(value.data)), len(value.data)]


_WRITERS: dict[type[Any], Callable[[_MessageEncoder, Any], Any]] = {
    tuple: lambda encoder, value: _ext(_TUPLE, encoder._items(value)),
    dict: lambda encoder, value: _ext(_PAIRS, [encoder._items(value.keys()), encoder._items(value.values())]),
    set: lambda encoder, value: _ext(_SET, encoder._items(value)),
    frozenset: lambda encoder, value: _ext(_FROZENSET, encoder._items(value)),
    complex: lambda encoder, value: _ext(_COMPLEX, [value.real, value.imag]),
    PosixPath: lambda encoder, value: _ext(_PATH, str(value)),
    torch.dtype: lambda encoder, value: _ext(_DTYPE, str(value).removeprefix("torch.")),
    torch.Size: lambda encoder, value: _ext(_SIZE, list(value)),
    Tensor: lambda encoder, value: _ext(_TENSOR, encoder._tensor(value)),
    np.ndarray: lambda encoder, value: _ext(_ARRAY, encoder._array(value)),
    Opaque: lambda encoder, value: _ext(_OPAQUE, encoder._opaque(value)),
}


class _MessageDecoder:
    def __init__(self, buffers: memoryview, is_authentic: bool) -> None:
        self._buffers, self._is_authentic = buffers, is_authentic
        self.read = msgspec.msgpack.Decoder(ext_hook=self._ext).decode

    def _ext(self, code: int, data: memoryview) -> Any:
        if not 0 <= code < len(_READERS):
            raise InvalidMessage(f"a value has the unknown type code {code}")
        return _READERS[code](self, self.read(data))

    def _bytes(self, start: int, count: int) -> memoryview:
        if start < 0 or count < 0 or start + count > len(self._buffers):
            raise InvalidMessage("a tensor is longer than its message")
        return self._buffers[start : start + count]

    def _tensor(self, name: str, shape: list[int], start: int) -> Tensor:
        dtype, count = _DTYPES[name], _count(shape)
        data = bytearray(self._bytes(start, count * dtype.itemsize))
        return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)

    def _array(self, name: str, shape: list[int], start: int) -> np.ndarray[Any, Any]:
        if not _ARRAY_DTYPE.fullmatch(name):
            raise InvalidMessage(f"an array has the unsupported dtype {name}")
        dtype, count = np.dtype(name), _count(shape)
        data = bytearray(self._bytes(start, count * dtype.itemsize))
        return np.frombuffer(data, dtype).reshape(shape) if data else np.empty(shape, dtype)

    def _record(self, name: str, fields: dict[str, Any]) -> Any:
        return _records[name](**fields)

    def _opaque(self, start: int, count: int) -> Opaque:
        return Opaque(bytes(self._bytes(start, count)), self._is_authentic)


def _count(shape: list[int]) -> int:
    if any(type(size) is not int or size < 0 for size in shape):
        raise InvalidMessage(f"a tensor has the invalid shape {shape}")
    return math.prod(shape)


_READERS: tuple[Callable[[_MessageDecoder, Any], Any], ...] = (
    lambda decoder, content: int(content, 16),
    lambda decoder, content: tuple(content),
    lambda decoder, content: dict(zip(*content, strict=True)),
    lambda decoder, content: set(content),
    lambda decoder, content: frozenset(content),
    lambda decoder, content: complex(*content),
    lambda decoder, content: Path(content),
    lambda decoder, content: _DTYPES[content],
    lambda decoder, content: torch.Size(content),
    lambda decoder, content: decoder._tensor(*content),
    lambda decoder, content: decoder._array(*content),
    lambda decoder, content: decoder._array(*content)[()],
    lambda decoder, content: decoder._record(*content),
    lambda decoder, content: decoder._opaque(*content),
)
"""Functions that create the values of each extension type, indexed by its code."""
