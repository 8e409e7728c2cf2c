"""TFRecord files: a sequence of records, each with its length and checksums; a record is a tf.train.Example."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...core import DataError
from ..columns import cast
from ..order import Ids
from .format import FileShard, RecordFormat, damaged, file_size, record_blocks

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BITS = 63
"""Maximum shift of a byte in a 64-bit varint; decoding a longer varint would take quadratic time."""


@dataclass(frozen=True)
class TFRecordFormat(RecordFormat):
    """TFRecord files of tf.train.Example, read without TensorFlow; every checksum is verified."""

    name: ClassVar[str] = "tfrecord"
    endings: ClassVar[tuple[str, ...]] = ("tfrecord", "tfrecords")

    def scan(self, path: str) -> FileShard:
        num_bytes = file_size(path)
        with open(path, "rb", buffering=0) as file:
            marks = np.fromiter(_places(path, file.fileno(), num_bytes), np.int64)
        blocks = record_blocks(marks)
        return FileShard(path, num_bytes, blocks, marks, np.diff(marks[blocks]))

    def sample(self, record: bytes) -> dict[str, object]:
        body = record[_HEAD.size : -_TAIL.size]
        if masked(body) != _TAIL.unpack_from(record, len(record) - _TAIL.size)[0]:
            raise ValueError("a record with a wrong checksum")
        features = dict(_features(body))
        if self.columns is None:
            return features
        return {name: _typed(name, features, kind) for name, kind in self.columns.items()}


def masked(data: bytes) -> int:
    """Return the checksum of some bytes as TFRecord files store it: crc32c, rotated and with an offset."""
    crc = _crc32c()(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise DataError(
            "reading TFRecord files needs google-crc32c", remedy="install it with pip install 'manyhands[files]'"
        ) from error
    return google_crc32c.value  # type: ignore[no-any-return]


def _places(path: str, fd: int, num_bytes: int) -> Iterator[int]:
    """Yield the offset of every record, and of the end of the last one; raise DataError for a damaged file."""
    place, row = 0, 0
    yield place
    while place < num_bytes:
        head = os.pread(fd, _HEAD.size, place)
        if len(head) < _HEAD.size:
            raise damaged(path, row, "a file that ends in the middle of a length", "record")
        length, checksum = _HEAD.unpack(head)
        if masked(head[:8]) != checksum:
            raise damaged(path, row, "a length with a wrong checksum", "record")
        place += _HEAD.size + length + _TAIL.size
        if place > num_bytes:
            raise damaged(path, row, f"a file that ends {place - num_bytes} bytes too early", "record")
        row += 1
        yield place


def _features(body: bytes) -> Iterator[tuple[str, Any]]:
    """Yield the features of an encoded tf.train.Example by name.

    The fields are Example.features (1), Features.feature (1), and of each entry the name (1) and the value (2).
    """
    for _, features in _parts(body):
        for _, entry in _parts(features):
            pair = dict(_parts(entry))
            yield pair.get(1, b"").decode(), _values(pair.get(2, b""))


def _values(feature: bytes) -> Any:
    """Return the values of an encoded tf.train.Feature: bytes (field 1), floats (2) or integers (3)."""
    for kind, values in _parts(feature):
        if kind == 1:
            return [value for _, value in _parts(values)]
        if kind == 2:
            return np.frombuffer(b"".join(part for _, part in _parts(values)), "<f4").copy()
        if kind == 3:
            return _varints(b"".join(part for _, part in _parts(values)))
    return np.array([], np.float32)


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of every field of a protobuf message; the bytes of a varint are not decoded."""
    place, size = 0, len(data)
    while place < size:
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _BYTES:
            length, place = _varint(data, place)
            stop = place + length
        elif kind == _VARINT:
            stop = _varint(data, place)[1]
        elif kind in (_FIXED32, _FIXED64):
            stop = place + (4 if kind == _FIXED32 else 8)
        else:
            raise ValueError(f"a record that is not a tf.train.Example (wire type {kind})")
        if stop > size:
            raise ValueError("a record that is not a tf.train.Example (a field is longer than the record)")
        yield tag >> 3, data[place:stop]
        place = stop


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if place >= len(data):
            raise ValueError("a record that is not a tf.train.Example (it ends in the middle of a number)")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > _VARINT_BITS:
            raise ValueError("a record that is not a tf.train.Example (a number of more than 10 bytes)")


def _varints(data: bytes) -> Ids:
    """Decode consecutive varints with a few numpy operations."""
    values = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(values < 0x80)
    if len(values) and (not len(ends) or ends[-1] != len(values) - 1):
        raise ValueError("a record that is not a tf.train.Example (it ends in the middle of a number)")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
    shifts = 7 * (np.arange(len(values)) - np.repeat(starts, ends - starts + 1))
    bits = (values & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(bits, starts).astype(np.int64) if len(ends) else np.array([], np.int64)


def _typed(name: str, features: dict[str, Any], kind: str) -> Any:
    if name not in features:
        raise ValueError(f"a record without the feature {name!r} (it has {', '.join(map(repr, features)) or 'none'})")
    values, wanted = features[name], kind.removesuffix("[]")
    if isinstance(values, list) and wanted not in ("", "str", "bytes"):
        raise ValueError(f"bytes in {name!r} instead of {wanted} (write bytes in columns=)")
    if isinstance(values, list):
        values = [value.decode() for value in values] if wanted == "str" else values
    elif wanted:
        values = cast(values, wanted, name)
    if not kind or kind.endswith("[]"):
        return values
    if len(values) != 1:
        raise ValueError(f"{len(values)} values of {name!r} instead of one (write {kind}[] in columns=)")
    return values[0]
