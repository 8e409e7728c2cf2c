"""Transfer of batches out of worker processes through preallocated shared memory.

PyTorch creates a new shared-memory segment for every tensor of every batch, which costs a dozen system calls each and
can exceed the small /dev/shm of containers. Here every worker has a few slots, which it reuses.
"""

from __future__ import annotations

import io
import mmap
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SLOT_BYTES = 1 << 25
"""Bytes of a slot, which holds one batch; PyTorch sends larger batches. Only pages that are written take memory."""
SLOTS = 4
"""Slots per worker: for two batches read ahead, one that is being copied, and one spare."""
_ALIGN = 64
_INLINE = 512


@dataclass(frozen=True)
class PackedBatch:
    """A batch whose tensor data is in a slot of the shared memory."""

    body: bytes
    """The pickle of the batch without its large tensors."""
    places: tuple[tuple[int, int], ...]
    """Offset of each large tensor in the shared memory, and its number of bytes."""


class _TensorPickler(pickle.Pickler):
    """Pickle plain tensors with out-of-band buffers, as numpy arrays do by default."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout is not torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_quantized or obj.is_complex() or not obj.numel():
            return NotImplemented
        raw: Any = obj.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # Buffers small enough to stay in the message arrive as read-only bytes.
    writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).view(shape)


class WorkerSlots:
    """Memory that the training process shares with its workers, allocated before they are forked."""

    def __init__(self, num_workers: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, num_workers * SLOTS * SLOT_BYTES, flags=flags)
        self._numbers = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._turn = 0

    def put(self, batch: Any, worker: int) -> Any:
        """Write a batch into a slot of this worker and return a `PackedBatch`; return the batch if it does not fit."""
        buffers: list[pickle.PickleBuffer] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            small = buffer.raw().nbytes < _INLINE
            if not small:
                buffers.append(buffer)
            return small

        body = io.BytesIO()
        _TensorPickler(body, protocol=5, buffer_callback=is_small).dump(batch)
        views = [buffer.raw() for buffer in buffers]
        if sum(view.nbytes + _ALIGN for view in views) > SLOT_BYTES:
            return batch
        places, place = [], (worker * SLOTS + self._turn) * SLOT_BYTES
        self._turn = (self._turn + 1) % SLOTS
        for view in views:
            self._memory[place : place + view.nbytes] = view
            places.append((place, view.nbytes))
            place += -(-view.nbytes // _ALIGN) * _ALIGN
        return PackedBatch(body.getvalue(), tuple(places))

    def take(self, item: Any) -> Any:
        """Return a batch that a worker sent; a `PackedBatch` is copied out of its slot, which is then free."""
        if not isinstance(item, PackedBatch):
            return item
        copies = [self._numbers[place : place + size].clone().numpy() for place, size in item.places]
        return pickle.loads(item.body, buffers=copies)
