"""Split of global Keras batches: the rows of each batch that a replica computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from keras import tree
from torch.utils.weak import WeakIdKeyDictionary

from ..core import StrategyError


@dataclass(frozen=True)
class MicroBatchRows:
    """The rows of one micro-batch that this replica computes: `size` rows from row `start` of the global batch."""

    start: int
    size: int
    total: int
    """Rows of the whole step, over all replicas and micro-batches."""
    last: bool = True

    @property
    def is_padding(self) -> bool:
        """Whether this replica has no rows of the micro-batch; it then computes a borrowed row for the collectives."""
        return self.size == 0

    @property
    def weight(self) -> float:
        """Fraction of the step's rows that this replica computes in this micro-batch."""
        return self.size / self.total


@dataclass(frozen=True)
class KerasShare:
    """The rows of a global batch that one replica computes.

    The batch is split into micro-batches first, and then each micro-batch over the replicas.

    >>> [(rows.start, rows.size) for rows in KerasShare.of(7, rank=1, size=2).rows]
    [(3, 4)]
    >>> KerasShare.of(7, rank=1, size=2, micros=2).ids([10, 11, 12, 13, 14, 15, 16])
    [11, 12, 15, 16]
    """

    rows: tuple[MicroBatchRows, ...]

    @classmethod
    def of(cls, total: int, *, rank: int | None, size: int, micros: int = 1) -> KerasShare:
        """Return the share of replica `rank` of `size` replicas in a batch of `total` rows.

        The batch is split into `micros` micro-batches, or into one per row if it has fewer rows. A process that
        computes no rows, such as a parameter server, has rank None and gets an empty share.
        """
        rows = []
        num_micros = max(1, min(micros, total))
        for micro in range(num_micros):
            first, end = total * micro // num_micros, total * (micro + 1) // num_micros
            bounds = (0, 0) if rank is None else (rank, rank + 1)
            start, stop = (first + (end - first) * bound // size for bound in bounds)
            rows.append(MicroBatchRows(start, stop - start, total, last=micro == num_micros - 1))
        return cls(tuple(rows))

    @property
    def total(self) -> int:
        """Number of rows of the whole batch."""
        return self.rows[0].total

    def ids(self, ids: list[Any]) -> list[Any]:
        """Return this replica's elements of `ids`, the samples of the whole batch.

        For a micro-batch in which this replica has no samples, the first sample of the batch is borrowed.
        """
        return [sample for rows in self.rows for sample in ids[rows.start : rows.start + rows.size] or ids[:1]]

    @classmethod
    def among(cls, counts: list[int], rank: int) -> KerasShare:
        """Return the share of replica `rank` in a batch to which replica i contributes `counts[i]` rows.

        >>> KerasShare.among([3, 2], 1).rows
        (MicroBatchRows(start=3, size=2, total=5, last=True),)
        """
        return cls((MicroBatchRows(sum(counts[:rank]), counts[rank], sum(counts)),))

    @property
    def is_empty(self) -> bool:
        """Whether this replica has no rows in any micro-batch."""
        return all(rows.is_padding for rows in self.rows)

    def taken(self, batch: Any) -> Any:
        """Return this replica's rows of `batch`, arrays in any structure with the rows of all replicas."""
        return _mapped(lambda leaf: leaf[self.ids(list(range(self.total)))], batch)

    def micros(self, own: Any) -> Iterator[tuple[MicroBatchRows, Any]]:
        """Yield the rows and the arrays of each micro-batch of `own`, this replica's part of a batch."""
        if len(self.rows) == 1:
            yield self.rows[0], own
            return
        start = 0
        for rows in self.rows:
            stop = start + max(1, rows.size)
            yield rows, _mapped(lambda leaf, start=start, stop=stop: leaf[start:stop], own)  # type: ignore[misc]
            start = stop


def num_rows(batch: Any) -> int:
    """Return the number of rows of a batch of arrays, in any structure."""
    return int(next(leaf for leaf in tree.flatten(batch) if leaf is not None).shape[0])


def without_rows(batch: Any) -> Any:
    """Return the arrays of a batch sliced to zero rows, in the same structure."""
    return _mapped(lambda leaf: leaf[:0], batch)


def _mapped(cut: Callable[[Any], Any], batch: Any) -> Any:
    return tree.map_structure(lambda leaf: None if leaf is None else cut(leaf), batch)


_handed_out: list[KerasShare] = []
_shares: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The share to which each array passed to `hand_out` belongs, as long as the array exists."""


def hand_out(share: KerasShare, own: Any = None) -> None:
    """Record `share` for the next step of Keras, and as the share of the arrays in `own`, this replica's rows."""
    _handed_out[:] = [share]
    for leaf in _arrays(own):
        _shares[leaf] = share


def known_share(values: Any) -> KerasShare | None:
    """Return the share that `hand_out` recorded for the first known array in `values`; None if no array is known."""
    return next((_shares[leaf] for leaf in _arrays(values) if leaf in _shares), None)


def _arrays(values: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(values) if isinstance(leaf, (torch.Tensor, np.ndarray))]


def take_share(own: Any) -> KerasShare:
    """Return the share that `hand_out` recorded for the step with the rows `own`, and clear it.

    Raise StrategyError if no share was recorded.
    """
    if not _handed_out:
        raise StrategyError(
            "a step of a distributed model needs this replica's part of a batch",
            got=f"{num_rows(own)} rows that were not split over the replicas",
            remedy="use fit, evaluate, predict or train_on_batch, or call strategy.run in a custom training loop",
        )
    return _handed_out.pop()
