"""Source: what a feed reads from, the base of every kind of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..core import DataError
from .order import Ids, Order

Collate = Callable[[list[Any]], Any]
CHUNK = 1024
"""Samples that are measured at a time."""


@dataclass(frozen=True)
class Window:
    """One global batch, not yet read: its samples' ids, and the function that reads some of them."""

    ids: Ids
    fetch: Callable[[Ids], Any]


class Source(ABC):
    """Samples by id, read as batches."""

    max_workers: int
    """Processes that can read it at once; 0: reading runs no code of the user and is fastest in place."""

    name: str
    """What a person calls it in an error: the class of the dataset."""
    size: int | None = None
    """Samples in an epoch; None: a stream of unknown length."""
    batch_size: int | None = None
    """Global batch size that the data brought."""
    sized_by: str = "DataLoader"
    """What brought it, where something did."""
    shuffle: bool | None = None
    """Whether a DataLoader shuffles; None: the caller decides."""
    drop_last: bool = False
    """Whether a DataLoader leaves a last, smaller batch out."""
    workers: int | None = None
    """Worker processes that a DataLoader asked for."""
    worker_init: Callable[[int], None] | None = None
    """What a DataLoader runs at the start of each of its workers."""

    @abstractmethod
    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        """The global batches of an epoch from position `start` on."""

    @abstractmethod
    def fetch(self, ids: Ids) -> Any:
        """Some samples as one batch."""

    def num_steps(self, batch_size: int) -> int | None:
        """Global batches in an epoch; None where nobody knows."""
        return None if self.size is None else -(-self.size // batch_size)


class IndexedSource(Source):
    """Samples that can be read in any order."""

    size: int

    def order(self, seed: int, epoch: int, shuffle: bool) -> Any:
        """The samples of an epoch by position: has a length, and gives ids for a slice."""
        return Order(self.size, seed, epoch, shuffle)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        """The function that reads samples in this epoch."""
        return self.fetch

    def samples(self, ids: Sequence[int]) -> list[Any]:
        """Some samples, each by itself."""
        raise DataError(
            "to be measured, data must have single samples",
            got=self.name,
            remedy="pass the lengths themselves: length=[3, 7, ...]",
        )

    def lengths(self, length: str | Callable[[Any], int]) -> Ids:
        """How long every sample is, by a function of it or in one of its fields."""
        measure = partial(_length_of, length) if isinstance(length, str) else length
        chunks = (range(first, min(first + CHUNK, self.size)) for first in range(0, self.size, CHUNK))
        return as_ids([measure(sample) for ids in chunks for sample in self.samples(ids)])

    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        order, fetch = self.order(seed, epoch, shuffle), self.reader(seed, epoch)
        for first in range(start, len(order), batch_size):
            yield Window(order[first : first + batch_size], fetch)


def _length_of(field: str, sample: Any) -> int:
    return len(sample[field])


def collated(samples: list[Any], collate: Collate, name: str) -> Any:
    """Samples as one batch, or an error that says whose they are."""
    try:
        return collate(samples)
    except Exception as error:
        raise DataError(
            f"samples of {name} must collate into one batch",
            got=f"{type(error).__name__}: {error}",
            remedy="make their shapes and types equal, pass collate=fn(list of samples), or give samples as dicts, "
            "whose fields are padded: {'tokens': ..., 'label': ...}",
        ) from error


def unreadable(name: str, sample: int, error: BaseException) -> DataError:
    """The error for a sample that cannot be read."""
    return DataError(
        f"every sample of {name} must be readable",
        got=f"{type(error).__name__}: {error} at sample {sample}",
        remedy=f"mend or leave out sample {sample}",
    )


def check_source(source: Source, batch_size: int | None) -> int:
    """The global batch size to train with, or an error if this source cannot give such batches."""
    if batch_size is not None and source.batch_size not in (None, batch_size):
        raise DataError(
            f"batch_size of the task and of its {source.sized_by} must agree",
            got=f"{batch_size} and {source.batch_size}",
            remedy="give only one of them; both are the global batch",
        )
    size = batch_size or source.batch_size
    if size is None:
        raise DataError(
            f"data that is not a DataLoader ({source.name}) needs a batch_size",
            got="none",
            remedy="pass batch_size=32",
        )
    if source.size == 0:
        raise DataError("data must have samples", got=f"none in {source.name}", remedy="check its path or its filter")
    if source.size is not None and source.size < size:
        raise DataError(
            f"{source.name} must have at least one batch",
            got=f"{source.size} samples for a batch of {size}",
            remedy=f"pass batch_size={source.size} or less{_columns(source)}",
        )
    return size


def _columns(source: Source) -> str:
    """A tuple of lists is read as samples, which is seldom meant."""
    return (
        "; if these are columns, turn them into arrays: torch.tensor(...)" if source.name in ("tuple", "list") else ""
    )


def as_ids(values: Any) -> Ids:
    """Whole numbers as an array of ids."""
    return np.asarray(values, dtype=np.int64)
