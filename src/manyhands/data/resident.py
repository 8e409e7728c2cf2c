"""Resident arrays: data that is small against the device's memory moves there once, and batches are gathered there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batch import to_device
from .order import Ids
from .source import Window

SHARE = 16
"""What is resident takes at most one part in so many of the device's memory."""
NUM_AHEAD = 64
"""Batches whose ids travel to the device together."""


class Resident:
    """Nested arrays on a device."""

    def __init__(self, arrays: Any, device: torch.device, dtype: torch.dtype | None) -> None:
        self._arrays, self._device = to_device(arrays, device, dtype=dtype), device

    def fetch(self, index: Tensor) -> Any:
        """Some rows, gathered on the device."""
        return _rows(self._arrays, index)

    def ids(self, windows: Iterator[Window], rows: Callable[[Window], Ids]) -> Iterator[tuple[Window, Ids, Tensor]]:
        """Windows with the ids of the rows that are wanted of each, on the host and on the device."""
        while group := list(islice(windows, NUM_AHEAD)):
            wanted = [rows(window) for window in group]
            together = torch.from_numpy(np.concatenate(wanted))
            if self._device.type == "cuda":
                together = together.pin_memory()
            moved = together.to(self._device, non_blocking=True)
            yield from zip(group, wanted, moved.split([len(ids) for ids in wanted]), strict=True)


def fits(num_bytes: int, device: torch.device) -> bool:
    """Whether so much may stay on this device."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return num_bytes <= min(total // SHARE, free // 4)


def _rows(arrays: Any, index: Tensor) -> Any:
    if isinstance(arrays, Tensor):
        return arrays.index_select(0, index)
    if isinstance(arrays, dict):
        return {key: _rows(child, index) for key, child in arrays.items()}
    parts = [_rows(child, index) for child in arrays]
    return type(arrays)(*parts) if hasattr(arrays, "_fields") else tuple(parts)
