"""The order of an epoch: position -> sample, from (seed, epoch) and independent of the number of replicas."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
        """Return positions [start, stop), from the chunks that hold them."""
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
    """Return one table of well-mixed half-words per round, which makes a round a lookup instead of a hash."""
    inputs = np.arange(1 << half, dtype=np.uint64)
    return [_hashed(inputs, mix(key, number), half) for number in range(_ROUNDS)]


def _hashed(inputs: npt.NDArray[np.uint64], key: int, bits: int) -> Ids:
    z = inputs * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(64 - bits)).astype(np.int64)
