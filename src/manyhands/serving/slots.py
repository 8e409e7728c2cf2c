"""Slots: memory shared by a server and a replica, which holds batches and their outputs.

The memory is anonymous and passed over a socket, so it has no name to leak or to guess, and needs no /dev/shm.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..core import Signature, TensorSpec
from .dtypes import BY_TORCH, Array, num_items
from .texts import MAX_TEXTS, TextRegion, is_text, width

FREE_BYTES = 256 << 20
"""Bytes for the inputs, or the outputs, of a batch with dynamic shapes; only used pages become real memory."""
BULK_BYTES = 16 << 20
"""Maximum bytes of the inputs and outputs of a batch of more rows than `max_rows`, which holds one request."""
NUM_SLOTS = 2
"""Number of slots: one batch is computed while the next one is written."""
_ALIGN = 64
Shapes = Sequence[tuple[int, ...]]
"""Shape of one row of each tensor. A tensor of strings has one more size: the bytes that a row may have at most."""
View = Array | TextRegion
_LENGTH_BYTES = 4


def row_shape(array: Array) -> tuple[int, ...]:
    """Return the shape of a row of an array, with the bytes of the longest row if it has strings."""
    return (*array.shape[1:], width(array)) if is_text(array) else array.shape[1:]


@dataclass(frozen=True)
class SlotLayout:
    """Layout of a slot: first the inputs, then the outputs."""

    signature: Signature
    max_rows: int
    """Rows of a batch that joins requests."""
    bulk_rows: int = 0
    """Rows of a batch of one request, if they are small."""

    @cached_property
    def num_rows(self) -> int:
        """Rows of fixed sizes that a slot holds."""
        sides = self.signature.inputs, self.signature.outputs
        if any(map(_is_free, sides)):
            return self.max_rows
        each = sum(_row_bytes(spec, _fixed(spec)) for specs in sides for spec in specs.values())
        return max(self.max_rows, min(self.bulk_rows, BULK_BYTES // each))

    @cached_property
    def input_bytes(self) -> int:
        """Bytes for the inputs of the largest batch."""
        return _capacity(self.signature.inputs, self.num_rows)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.input_bytes + _capacity(self.signature.outputs, self.num_rows)

    def rows_fitting(self, shapes: Shapes) -> int:
        """Return how many rows of these shapes fit into a slot; without dynamic dims, the largest batch."""
        specs = self.signature.inputs
        most = self.max_rows
        for spec, shape in zip(specs.values(), shapes, strict=True):
            if BY_TORCH[spec.dtype].is_text:
                # Strings are objects, whose number is limited.
                most = min(most, max(1, MAX_TEXTS // num_items(shape[:-1])))
        if self.input_bytes < FREE_BYTES or _end(specs, most, shapes) <= self.input_bytes:
            return most
        free_bytes = self.input_bytes - _ALIGN * len(specs)
        each = sum(_row_bytes(spec, shape) for spec, shape in zip(specs.values(), shapes, strict=True))
        return min(most, free_bytes // each)

    def bulk_fitting(self, shapes: Shapes) -> int:
        """Return how many rows of these shapes a batch of one request may have."""
        return self.num_rows if self.num_rows > self.max_rows else self.rows_fitting(shapes)


class ReplicaSlots:
    """The slots of one replica, seen from either side."""

    def __init__(self, layout: SlotLayout, fd: int) -> None:
        self.layout = layout
        self._memory = mmap.mmap(fd, NUM_SLOTS * layout.slot_bytes)
        self._bytes: Array = np.frombuffer(self._memory, np.uint8)

    @classmethod
    def create(cls, layout: SlotLayout) -> tuple[ReplicaSlots, int]:
        """Create slots; return them and the descriptor for the replica, which the caller closes."""
        fd = os.memfd_create("manyhands-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(fd, NUM_SLOTS * layout.slot_bytes)
        # A replica that truncated the memory would crash the server by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(layout, fd), fd

    @property
    def address(self) -> tuple[int, int]:
        """Address of the memory in this process, and its size in bytes."""
        return self._bytes.ctypes.data, self._bytes.nbytes

    def inputs(self, slot: int, size: int, shapes: Shapes) -> dict[str, View]:
        """Return views of a batch's inputs."""
        return self._views(self.layout.signature.inputs, slot * self.layout.slot_bytes, size, shapes)

    def outputs(self, slot: int, size: int, shapes: Shapes) -> dict[str, View]:
        """Return views of a batch's outputs; raises ValueError if their shapes do not match the signature."""
        for (name, spec), shape in zip(self.layout.signature.outputs.items(), shapes, strict=True):
            sizes = _sizes(spec, shape)
            if min(shape, default=0) < 0 or any(
                want not in (None, have) for want, have in zip(spec.shape[1:], sizes, strict=True)
            ):
                raise ValueError(f"output {name!r} must be {spec}, but its rows are {shape}")
        start = slot * self.layout.slot_bytes + self.layout.input_bytes
        limit = self.layout.slot_bytes - self.layout.input_bytes
        if _end(self.layout.signature.outputs, size, shapes) > limit:
            raise ValueError(f"the outputs of a batch must have at most {limit} bytes, but got more")
        return self._views(self.layout.signature.outputs, start, size, shapes)

    def _views(self, specs: Mapping[str, TensorSpec], start: int, size: int, shapes: Shapes) -> dict[str, View]:
        views: dict[str, View] = {}
        for (name, spec), shape in zip(specs.items(), shapes, strict=True):
            if BY_TORCH[spec.dtype].is_text:
                views[name] = self._texts(start, size, shape)
                start += _aligned(size * _row_bytes(spec, shape))
                continue
            kind = BY_TORCH[spec.dtype].numpy
            num = size * math.prod(shape)
            views[name] = self._bytes[start : start + num * kind.itemsize].view(kind).reshape(size, *shape)
            start += _aligned(num * kind.itemsize)
        return views

    def _texts(self, start: int, size: int, shape: tuple[int, ...]) -> TextRegion:
        num = size * math.prod(shape[:-1])
        middle = start + num * _LENGTH_BYTES
        lengths = self._bytes[start:middle].view(np.uint32)
        return TextRegion(lengths, self._bytes[middle : middle + size * shape[-1]], (size, *shape[:-1]))


class Dims:
    """Variable part of a message about a batch: the shape of one row of each tensor."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self._ranks = [len(spec.shape) - (0 if BY_TORCH[spec.dtype].is_text else 1) for spec in specs]
        self._struct = struct.Struct(f"<{sum(self._ranks)}q")

    def pack(self, shapes: Shapes) -> bytes:
        """Return the shapes as bytes."""
        return self._struct.pack(*(size for shape in shapes for size in shape))

    def unpack(self, message: bytes, offset: int) -> list[tuple[int, ...]]:
        """Return the shapes from bytes."""
        sizes, shapes, at = self._struct.unpack_from(message, offset), [], 0
        for rank in self._ranks:
            shapes.append(tuple(sizes[at : at + rank]))
            at += rank
        return shapes


def _capacity(specs: Mapping[str, TensorSpec], rows: int) -> int:
    if _is_free(specs):
        return FREE_BYTES
    return _end(specs, rows, list(map(_fixed, specs.values()))) or _ALIGN


def _is_free(specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether rows have no fixed number of bytes."""
    return any(None in spec.shape[1:] or BY_TORCH[spec.dtype].is_text for spec in specs.values())


def _fixed(spec: TensorSpec) -> tuple[int, ...]:
    return tuple(size or 0 for size in spec.shape[1:])


def _end(specs: Mapping[str, TensorSpec], rows: int, shapes: Shapes) -> int:
    """Return the bytes of tensors; empty lists count as values, because they take as much in a text."""
    return sum(_aligned(rows * _row_bytes(spec, shape)) for spec, shape in zip(specs.values(), shapes, strict=True))


def _row_bytes(spec: TensorSpec, shape: tuple[int, ...]) -> int:
    """Return the bytes of a row; empty lists count as values, because they take as much in a text."""
    kind = BY_TORCH[spec.dtype]
    if kind.is_text:
        return _LENGTH_BYTES * num_items(shape[:-1]) + shape[-1]
    return num_items(shape) * kind.numpy.itemsize


def _sizes(spec: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of a row that the signature knows."""
    return shape[:-1] if BY_TORCH[spec.dtype].is_text else shape


def _aligned(offset: int) -> int:
    return (offset + _ALIGN - 1) // _ALIGN * _ALIGN
