"""The orders of many epochs, computed together on a device; each row equals what `Order` gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .order import Order


class Orders:
    """Orders of several (seed, epoch) pairs; row i is that of pair i.

    >>> rows = Orders(5, [(0, 0), (1, 2)], shuffle=True, device=torch.device("cpu"))[torch.arange(5).expand(2, 5)]
    >>> rows[1].tolist() == Order(5, seed=1, epoch=2, shuffle=True)[:].tolist()
    True
    """

    def __init__(self, size: int, passes: Sequence[tuple[int, int]], *, shuffle: bool, device: torch.device) -> None:
        self._size, self._shuffle = size, shuffle
        if not shuffle:
            return
        known = {key: number for number, key in enumerate(dict.fromkeys(passes))}
        orders = [Order(size, seed, epoch, shuffle=True) for seed, epoch in known]
        self._half = orders[0].half
        tables = np.stack([np.stack(order.tables) for order in orders], axis=1)
        self._tables = torch.from_numpy(tables).to(device).flatten(1)
        places = torch.tensor([known[key] << self._half for key in passes], dtype=torch.int64)
        self._places = places.to(device).unsqueeze(1)
        """The offset of each row's tables."""

    def __getitem__(self, positions: Tensor) -> Tensor:
        """Return the samples at some positions of every row."""
        if not self._shuffle:
            return positions
        places = self._places.expand_as(positions).reshape(-1)
        values = self._feistel(positions.reshape(-1), places)
        outside = (values >= self._size).nonzero().squeeze(1)
        while len(outside):
            values[outside] = self._feistel(values[outside], places[outside])
            outside = outside[values[outside] >= self._size]
        return values.view_as(positions)

    def _feistel(self, values: Tensor, places: Tensor) -> Tensor:
        left, right = values >> self._half, values & ((1 << self._half) - 1)
        for table in self._tables:
            left, right = right, left ^ table.index_select(0, places + right)
        return (left << self._half) | right
