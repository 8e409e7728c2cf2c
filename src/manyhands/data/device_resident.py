"""Resident arrays: data that is small compared with the device's memory is copied to the device once.

Batches are then gathered on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import Batch, Cursor, to_device
from .batch_split import ReplicaShare
from .order import Ids
from .source import ArraySource, Source, SubsetSource, Window

SHARE = 16
"""Resident data takes at most 1/SHARE of the device's memory."""
NUM_AHEAD = 64
"""Number of batches whose ids are copied to the device together."""


class Resident:
    """The nested arrays of a source, copied to a device."""

    def __init__(self, arrays: Any, device: torch.device, dtype: torch.dtype | None) -> None:
        self._arrays, self._device = to_device(arrays, device, dtype=dtype), device

    def fetch(self, index: Tensor) -> Any:
        """Gather some rows on the device; an index with several dims adds as many leading dims to the result."""
        return _rows(self._arrays, index)

    def batch(self, index: Tensor, ids: Ids, share: ReplicaShare, cursor: Cursor) -> ResidentBatch:
        """Return a batch whose data is gathered at its first access."""
        return ResidentBatch(self, index, share.sizes, share.global_sizes, ids, cursor)

    def ids(self, windows: Iterator[Window], rows: Callable[[Window], Ids]) -> Iterator[tuple[Window, Ids, Tensor]]:
        """Yield each window with the ids that `rows(window)` returns: as an array, and as a tensor on the device."""
        while group := list(islice(windows, NUM_AHEAD)):
            wanted = [rows(window) for window in group]
            together = torch.from_numpy(np.concatenate(wanted))
            if self._device.type == "cuda":
                together = together.pin_memory()
            moved = together.to(self._device, non_blocking=True)
            yield from zip(group, wanted, moved.split([len(ids) for ids in wanted]), strict=True)


class ResidentBatch(Batch):
    """A batch of arrays that are on the device; its rows are gathered by an index when `data` is accessed first."""

    def __init__(
        self,
        resident: Resident,
        index: Tensor,
        sizes: tuple[int, ...],
        global_sizes: tuple[int, ...],
        ids: Ids,
        cursor: Cursor,
    ) -> None:
        self.__dict__.update(
            resident=resident, index=index, sizes=sizes, global_sizes=global_sizes, ids=ids, cursor=cursor
        )

    resident: Resident
    index: Tensor

    @property
    def data(self) -> Any:
        """Nested tensors on the device, gathered at the first access."""
        if "gathered" not in self.__dict__:
            self.__dict__["gathered"] = self.resident.fetch(self.index)
        return self.__dict__["gathered"]


def lies_in_memory(source: Source) -> bool:
    """Return whether a source reads arrays in memory, or some rows of them."""
    return isinstance(source, ArraySource | SubsetSource)


def in_memory(source: Source) -> Any:
    """Return the nested arrays of a source for which `lies_in_memory` is true; row i is sample i."""
    assert isinstance(source, ArraySource | SubsetSource)
    return source.arrays if isinstance(source, ArraySource) else source.fetch(np.arange(source.size))


def fits(num_bytes: int, device: torch.device) -> bool:
    """Return whether data of `num_bytes` bytes may be copied to the device to stay there: always False on the CPU."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    allowed = total * torch.cuda.get_per_process_memory_fraction(device)
    return num_bytes <= min(allowed // SHARE, free // 4)


def _rows(arrays: Any, index: Tensor) -> Any:
    if isinstance(arrays, Tensor):
        return arrays.index_select(0, index) if index.dim() == 1 else arrays[index]
    if isinstance(arrays, dict):
        return {key: _rows(child, index) for key, child in arrays.items()}
    parts = [_rows(child, index) for child in arrays]
    return type(arrays)(*parts) if hasattr(arrays, "_fields") else tuple(parts)
