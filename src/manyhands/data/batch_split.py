"""Split of a global batch into micro-batches, and of each micro-batch over the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from .order import Ids


@dataclass(frozen=True)
class ReplicaShare:
    """One replica's part of a global batch."""

    rows: slice | Ids
    """The replica's rows of the global batch, in order."""
    sizes: tuple[int, ...]
    """Number of the replica's samples in each micro-batch."""
    global_sizes: tuple[int, ...]
    """Number of all replicas' samples in each micro-batch."""


def even_sizes(count: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of `parts` contiguous parts of `count` items, as even as possible, the larger ones first.

    >>> even_sizes(10, 4)
    (3, 3, 2, 2)
    """
    base, extra = divmod(count, parts)
    return (base + 1,) * extra + (base,) * (parts - extra)


def weighted_sizes(count: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of contiguous parts in proportion to weights, none empty if `count` suffices.

    >>> weighted_sizes(10, (2, 1)), weighted_sizes(3, (100, 1, 1)), weighted_sizes(1, (1, 1))
    ((7, 3), (1, 1, 1), (1, 0))
    """
    exact = [count * weight / sum(weights) for weight in weights]
    sizes = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda part: sizes[part] - exact[part])
    for part in by_remainder[: count - sum(sizes)]:
        sizes[part] += 1
    while count >= len(weights) and 0 in sizes:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return tuple(sizes)


@lru_cache(maxsize=256)
def share_of(
    count: int, accumulate: int, replica: int, num_replicas: int, weights: tuple[int, ...] | None = None
) -> ReplicaShare:
    """Return one replica's part of a global batch of `count` samples, split into at most `accumulate` micro-batches.

    The parts are as equal as possible, or in proportion to the replicas' `weights`.

    >>> share_of(10, 2, replica=1, num_replicas=2)
    ReplicaShare(rows=array([3, 4, 8, 9]), sizes=(2, 2), global_sizes=(5, 5))
    >>> share_of(10, 1, replica=1, num_replicas=2, weights=(3, 1)).sizes
    (2,)
    """
    global_sizes = even_sizes(count, min(accumulate, count))
    runs, start = [], 0
    for size in global_sizes:
        per_replica = even_sizes(size, num_replicas) if weights is None else weighted_sizes(size, weights)
        first = start + sum(per_replica[:replica])
        runs.append((first, first + per_replica[replica]))
        start += size
    sizes = tuple(stop - first for first, stop in runs)
    return ReplicaShare(_rows(runs), sizes, global_sizes)


def sizes_by(weights: tuple[int, ...] | None, count: int, accumulate: int, num_replicas: int) -> list[int]:
    """Return how many of `count` samples each replica gets by these weights; None for equal shares.

    >>> sizes_by(None, 10, 1, 2), sizes_by((2, 1), 10, 1, 2)
    ([5, 5], [7, 3])
    """
    shares = (share_of(count, accumulate, part, num_replicas, weights) for part in range(num_replicas))
    return [sum(share.sizes) for share in shares]


def part_of(ids: Ids, part: int, num_parts: int, accumulate: int = 1) -> Ids:
    """Return the ids of part number `part` of a global batch that is split into `num_parts` parts.

    >>> part_of(np.arange(5), 1, 2)
    array([3, 4])
    """
    return ids[share_of(len(ids), accumulate, part, num_parts).rows]


def _rows(runs: list[tuple[int, int]]) -> slice | Ids:
    """Return the rows of (start, stop) runs; of adjacent runs as a slice, because indexing with it copies nothing."""
    if all(stop == first for (_, stop), (first, _) in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return np.concatenate([np.arange(*run, dtype=np.int64) for run in runs])
