"""Order of rows that are stored in blocks: blocks are shuffled, and rows within windows of several blocks."""

from __future__ import annotations

import numpy as np

from .order import Ids, Order
from .randomness import mix


class BlockOrder:
    """A permutation of rows in which neighbors come from few blocks, so that a reader holds few blocks at a time.

    The blocks of all files are permuted; every `per_window` consecutive ones are a window, whose rows are permuted
    together. Positions can be read in any order; reading one computes the window that holds it.

    >>> order = BlockOrder(np.array([0, 3, 5, 9]), per_window=2, seed=0, epoch=0)
    >>> sorted(order[0:9].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8]
    >>> order[4:6].tolist() == order[0:9][4:6].tolist()
    True
    """

    def __init__(self, starts: Ids, per_window: int, seed: int, epoch: int) -> None:
        self._starts, self._per_window = starts, per_window
        self._key, self._epoch = mix(seed, epoch), epoch
        self._blocks = Order(len(starts) - 1, mix(seed, 1), epoch, True)[:]
        ends = np.cumsum(np.diff(starts)[self._blocks])
        self._bounds = np.concatenate([[0], ends[per_window - 1 :: per_window], ends[-1:]]).astype(np.int64)
        self._window: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, positions: slice) -> Ids:
        start, stop, step = positions.indices(len(self))
        assert step == 1, "positions of a batch are contiguous"
        pieces = []
        while start < stop:
            number = int(np.searchsorted(self._bounds, start, side="right")) - 1
            first, rows = int(self._bounds[number]), self._rows(number)
            pieces.append(rows[start - first : stop - first])
            start += len(pieces[-1])
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def _rows(self, number: int) -> Ids:
        """Return the rows of a window, in their order."""
        if self._window[0] != number:
            blocks = self._blocks[number * self._per_window : (number + 1) * self._per_window]
            rows = np.concatenate([np.arange(self._starts[block], self._starts[block + 1]) for block in blocks])
            self._window = number, rows[Order(len(rows), mix(self._key, number), self._epoch, True)[:]]
        return self._window[1]
