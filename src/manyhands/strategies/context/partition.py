"""Partitions: which items of a sequence each rank of the context axis holds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class SequencePartition:
    """The items of a sequence by rank: for each rank some ranges `[start, stop)`, in ascending order.

    >>> SequencePartition.balanced(8, 2).ranges
    (((0, 2), (6, 8)), ((2, 6),))
    """

    size: int
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def balanced(cls, size: int, num_ranks: int) -> SequencePartition:
        """Give each rank one range from the front and the matching one from the back.

        Under causal attention, where later items attend to more others, all ranks then have the same work.
        """
        cuts = [round(index * size / (2 * num_ranks)) for index in range(2 * num_ranks + 1)]
        parts = list(pairwise(cuts))
        return cls(size, tuple(_joined([parts[rank], parts[-1 - rank]]) for rank in range(num_ranks)))

    @property
    def counts(self) -> list[int]:
        """The number of items of every rank."""
        return [sum(stop - start for start, stop in ranges) for ranges in self.ranges]

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's items in the whole sequence."""
        return _positions(self, rank)

    def order(self) -> Tensor:
        """Return the index of each item of the sequence in the concatenation of all ranks' items."""
        return _order(self)

    def sliced(self, start: int, stop: int) -> SequencePartition:
        """Return the partition of the items from `start` to `stop`, which stay where they are.

        >>> SequencePartition.balanced(8, 2).sliced(1, 8).ranges
        (((0, 1), (5, 7)), ((1, 5),))
        """
        kept = (
            tuple((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop and b > start)
            for ranges in self.ranges
        )
        return SequencePartition(stop - start, tuple(kept))

    def local_slice(self, rank: int, start: int, stop: int) -> slice:
        """Return where a rank holds its items from `start` to `stop`: they are consecutive there."""
        before = sum(max(0, min(b, start) - a) for a, b in self.ranges[rank])
        return slice(before, before + self.sliced(start, stop).counts[rank])

    @staticmethod
    def concatenated(parts: Sequence[SequencePartition]) -> SequencePartition:
        """Return the partition of several sequences, one after the other, whose items stay where they are."""
        starts = list(accumulate((part.size for part in parts), initial=0))
        ranks = range(len(parts[0].ranges))
        shifted = (
            [(a + at, b + at) for part, at in zip(parts, starts, strict=False) for a, b in part.ranges[rank]]
            for rank in ranks
        )
        return SequencePartition(starts[-1], tuple(_joined(ranges) for ranges in shifted))


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ascending ranges without empty ones, adjacent ones as one."""
    found: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _positions(partition: SequencePartition, rank: int) -> Tensor:
    # Not as inference tensors, which autograd could not save later.
    with torch.inference_mode(False):
        ranges = [torch.arange(start, stop, device="cpu") for start, stop in partition.ranges[rank]]
        return torch.cat(ranges) if ranges else torch.arange(0, device="cpu")


@functools.lru_cache(maxsize=256)
def _order(partition: SequencePartition) -> Tensor:
    with torch.inference_mode(False):
        return torch.cat([_positions(partition, rank) for rank in range(len(partition.ranges))]).argsort()
