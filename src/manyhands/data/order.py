"""The order of an epoch: the sample at each position, from (seed, epoch) and independent of the number of replicas.

`Order` permutes all samples, `BlockOrder` rows that files store in blocks, and `Orders` computes many orders at once
on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .randomness import mix

Ids = npt.NDArray[np.int64]

_ROUNDS = 8
_CHUNK = 65_536


class Order:
    """A permutation of `range(size)` that is computed in chunks, so that size costs no memory.

    A Feistel network permutes the smallest domain with an even number of bits that holds `size`; values outside
    `size` are permuted again until they are inside (cycle walking).

    >>> sorted(Order(5, seed=0, epoch=0, shuffle=True)[:].tolist())
    [0, 1, 2, 3, 4]
    >>> Order(5, seed=0, epoch=0, shuffle=False)[1:3].tolist()
    [1, 2]
    """

    def __init__(self, size: int, seed: int, epoch: int, shuffle: bool) -> None:
        self._size = size
        self._shuffle = shuffle
        self.half = max(1, ((size - 1).bit_length() + 1) // 2)
        self.tables = _round_tables(self.half, mix(seed, epoch)) if shuffle else []
        self._chunk: Ids = np.empty(0, np.int64)
        self._chunk_start = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice | Ids) -> Ids:
        if not isinstance(positions, slice):
            wanted = np.asarray(positions, np.int64)
            return self._permute(wanted) if self._shuffle else wanted.copy()
        start, stop, step = positions.indices(self._size)
        assert step == 1, "positions of a batch are contiguous"
        if not self._shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return self._run(start, max(start, stop))

    def _run(self, start: int, stop: int) -> Ids:
        """Return the samples at positions [start, stop), from the chunks that contain them."""
        pieces = []
        while start < stop:
            chunk_start = start - start % _CHUNK
            self._load(chunk_start)
            piece = self._chunk[start - chunk_start : stop - chunk_start]
            pieces.append(piece)
            start += len(piece)
        # A copy, because the caller may write to the ids while the chunk is still in use.
        return pieces[0].copy() if len(pieces) == 1 else np.concatenate([*pieces, self._chunk[:0]])

    def _load(self, chunk_start: int) -> None:
        if chunk_start != self._chunk_start or not len(self._chunk):
            positions = np.arange(chunk_start, min(chunk_start + _CHUNK, self._size), dtype=np.int64)
            self._chunk, self._chunk_start = self._permute(positions), chunk_start

    def _permute(self, positions: Ids) -> Ids:
        values = self._feistel(positions)
        outside = np.flatnonzero(values >= self._size)
        while len(outside):
            values[outside] = self._feistel(values[outside])
            outside = outside[values[outside] >= self._size]
        return values

    def _feistel(self, values: Ids) -> Ids:
        left, right = values >> self.half, values & ((1 << self.half) - 1)
        for table in self.tables:
            left, right = right, left ^ table.take(right)
        return (left << self.half) | right


def _round_tables(half: int, key: int) -> list[Ids]:
    """Return a table of hashed half-words for each round, so that a round is a lookup and computes no hash."""
    inputs = np.arange(1 << half, dtype=np.uint64)
    return [_hashed(inputs, mix(key, number), half) for number in range(_ROUNDS)]


def _hashed(inputs: npt.NDArray[np.uint64], key: int, bits: int) -> Ids:
    z = inputs * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(64 - bits)).astype(np.int64)


def from_windows(positions: slice, length: int, window_at: Callable[[int], tuple[int, Ids]]) -> Ids:
    """Return the rows at contiguous positions of an order that is computed window by window.

    Args:
        positions: The positions, as a slice with step 1.
        length: Number of positions of the order.
        window_at: Returns, for a position, the first position of its window and the rows of that window.
    """
    start, stop, step = positions.indices(length)
    assert step == 1, "positions of a batch are contiguous"
    pieces = []
    while start < stop:
        first, rows = window_at(start)
        pieces.append(rows[start - first : stop - first])
        start += len(pieces[-1])
    return np.concatenate([np.empty(0, np.int64), *pieces])


class BlockOrder:
    """A permutation of rows in which neighbors come from few blocks, so that a reader holds few blocks at a time.

    The blocks of all files are permuted; every `per_window` consecutive ones are a window, whose rows are permuted
    together. `starts` has the first row of every block, and the number of all rows at its end. Positions can be read in
    any order; reading one computes the window that contains it.

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
        return from_windows(positions, len(self), self._window_at)

    def _window_at(self, position: int) -> tuple[int, Ids]:
        """Return the first position of the window that contains a position, and the rows of the window in order."""
        number = int(np.searchsorted(self._bounds, position, side="right")) - 1
        if self._window[0] != number:
            blocks = self._blocks[number * self._per_window : (number + 1) * self._per_window]
            rows = np.concatenate([np.arange(self._starts[block], self._starts[block + 1]) for block in blocks])
            self._window = number, rows[Order(len(rows), mix(self._key, number), self._epoch, True)[:]]
        return int(self._bounds[number]), self._window[1]


class Orders:
    """The orders of several (seed, epoch) pairs, computed together on a device; row i belongs to pair i.

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
        """The offset of each row's tables in `_tables`."""

    def __getitem__(self, positions: Tensor) -> Tensor:
        """Return the samples at the given positions of each order; row i of `positions` belongs to pair i."""
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
