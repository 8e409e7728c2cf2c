"""The way of a batch out of a worker process: through memory that both share from the start.

PyTorch hands over a new piece of shared memory for every tensor of every batch, which costs a dozen system calls each
and runs into the small /dev/shm of containers. Here every worker has a few slots, which it fills again and again.
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
"""Room for one batch; a larger one goes PyTorch's way. Memory is taken only where something is written."""
SLOTS = 4
"""Of each worker: two batches ahead, one that is being copied, and one to spare."""
_ALIGN = 64
_INLINE = 512


@dataclass(frozen=True)
class Parcel:
    """A batch whose numbers lie in a slot."""

    body: bytes
    places: tuple[tuple[int, int], ...]
    """Where each tensor begins, and its bytes."""


class _Pickler(pickle.Pickler):
    """Sets the numbers of plain tensors aside, as numpy's arrays do by themselves."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.layout is not torch.strided or obj.requires_grad:
            return NotImplemented
        if obj.is_quantized or obj.is_complex() or not obj.numel():
            return NotImplemented
        raw: Any = obj.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw), obj.dtype, tuple(obj.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    # What was small enough to stay in the message came as bytes that nobody may write to.
    writable = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(writable, dtype=dtype).view(shape)


class WorkerSlots:
    """Memory that the consumer and its workers share; made before they are forked."""

    def __init__(self, num_workers: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, num_workers * SLOTS * SLOT_BYTES, flags=flags)
        self._numbers = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._turn = 0

    def put(self, batch: Any, worker: int) -> Any:
        """A batch on its way out of a worker: a parcel, or itself where it does not fit."""
        buffers: list[pickle.PickleBuffer] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            small = buffer.raw().nbytes < _INLINE
            if not small:
                buffers.append(buffer)
            return small

        body = io.BytesIO()
        _Pickler(body, protocol=5, buffer_callback=is_small).dump(batch)
        views = [buffer.raw() for buffer in buffers]
        if sum(view.nbytes + _ALIGN for view in views) > SLOT_BYTES:
            return batch
        places, place = [], (worker * SLOTS + self._turn) * SLOT_BYTES
        self._turn = (self._turn + 1) % SLOTS
        for view in views:
            self._memory[place : place + view.nbytes] = view
            places.append((place, view.nbytes))
            place += -(-view.nbytes // _ALIGN) * _ALIGN
        return Parcel(body.getvalue(), tuple(places))

    def take(self, item: Any) -> Any:
        """The batch of a parcel, copied out of its slot, which is free from then on."""
        if not isinstance(item, Parcel):
            return item
        copies = [self._numbers[place : place + size].clone().numpy() for place, size in item.places]
        return pickle.loads(item.body, buffers=copies)
