"""Snapshot: a fast copy of tensors that keep changing, into CPU buffers that are reused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .tensors import require_storable


class Snapshot:
    """CPU buffers, one per name: the first copy allocates them, later ones only copy bytes."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return contiguous CPU copies, valid until the next call; tied tensors become separate tensors."""
        waiting = False
        kept = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                buffer = kept[name] = self._buffer(name, require_storable(name, tensor))
                buffer.copy_(tensor, non_blocking=tensor.is_cuda)
                waiting = waiting or tensor.is_cuda
        self._buffers = kept
        if waiting:
            torch.cuda.synchronize()
        return dict(kept)

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers = {}

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        # Copies from a GPU into pinned memory need no staging and overlap each other.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
