"""Sources: the base classes of the data from which a feed reads, and the source of arrays in memory.

An array is read by one index_select per batch, single or nested in tuples and dicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..core import DataError, counted
from .order import Ids, Order

Collate = Callable[[list[Any]], Any]
CHUNK = 1024
"""Number of samples whose lengths are measured at a time."""
Column = Callable[[Ids, torch.Tensor], torch.Tensor]
"""Function that reads rows of one array, given their ids as an array and as a tensor."""


@dataclass(frozen=True)
class Window:
    """One global batch that is not read yet: the ids of its samples, and the function that reads some of them."""

    ids: Ids
    fetch: Callable[[Ids], Any]


class Source(ABC):
    """Base class of sources of data, which read samples by id as batches."""

    max_workers: int
    """Maximum number of worker processes; 0 if reading runs no user code and is fastest in the training process."""

    name: str
    """Name of the data in error messages, such as the class of the dataset."""
    size: int | None = None
    """Number of samples in an epoch; None for a stream of unknown length."""
    batch_size: int | None = None
    """Global batch size that the data itself sets, as a DataLoader does; None if the task sets it."""
    sized_by: str = "DataLoader"
    """What set `batch_size`, for error messages."""
    shuffle: bool | None = None
    """Whether the data itself decides to shuffle, as a DataLoader does; None if the task decides."""
    drop_last: bool = False
    """Whether an epoch omits a last batch that is smaller than the others."""
    workers: int | None = None
    """Number of worker processes that a DataLoader requested; None if there is none."""
    worker_init: Callable[[int], None] | None = None
    """The `worker_init_fn` of a DataLoader, called at the start of each worker process."""

    @abstractmethod
    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        """Yield the global batches of an epoch, from the sample at position `start` on."""

    @abstractmethod
    def fetch(self, ids: Ids) -> Any:
        """Read the samples with these ids as one batch."""

    def num_steps(self, batch_size: int) -> int | None:
        """Return the number of global batches in an epoch; None if the length is unknown."""
        return None if self.size is None else -(-self.size // batch_size)


class IndexedSource(Source):
    """A source whose samples can be read in any order."""

    size: int

    def order(self, seed: int, epoch: int, shuffle: bool) -> Any:
        """Return the sample order of an epoch: an object with a length, whose slices are arrays of ids."""
        return Order(self.size, seed, epoch, shuffle)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        """Return the function that reads samples by id in this epoch, with random draws that depend on it."""
        return self.fetch

    def samples(self, ids: Sequence[int]) -> list[Any]:
        """Read the samples with these ids as a list, without collating them."""
        raise DataError(
            "lengths can only be measured of data with single samples",
            got=self.name,
            remedy="pass the lengths themselves: length=[3, 7, ...]",
        )

    def lengths(self, length: str | Callable[[Any], int]) -> Ids:
        """Return the length of every sample; `length` is a function of a sample, or the name of a field."""
        measure = partial(_length_of, length) if isinstance(length, str) else length
        chunks = (range(first, min(first + CHUNK, self.size)) for first in range(0, self.size, CHUNK))
        return as_ids([measure(sample) for ids in chunks for sample in self.samples(ids)])

    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        order, fetch = self.order(seed, epoch, shuffle), self.reader(seed, epoch)
        for first in range(start, len(order), batch_size):
            yield Window(order[first : first + batch_size], fetch)


class ArraySource(IndexedSource):
    """Source of nested arrays of equal length; sample i is row i of each array."""

    max_workers = 0

    def __init__(self, data: Any) -> None:
        self.name = "arrays"
        lengths = {path: len(leaf) for path, leaf in _leaves(data)}
        if len(set(lengths.values())) > 1:
            raise DataError(
                "arrays of one dataset must have the same length",
                got=", ".join(f"{path}: {length}" for path, length in lengths.items()),
                remedy="truncate them to one length; if each array is a sample, stack them: torch.stack(...)",
            )
        self.size = next(iter(lengths.values()))
        self.arrays = data
        self.num_bytes = sum(leaf.nbytes for _, leaf in _leaves(data))
        self._read = _reader(data)

    def fetch(self, ids: Ids) -> Any:
        return self._read(ids, torch.from_numpy(ids))


class SubsetSource(IndexedSource):
    """Source of some rows of arrays, as `torch.utils.data.random_split` returns them."""

    max_workers = 0

    def __init__(self, inner: IndexedSource, indices: Any) -> None:
        self.name = inner.name
        self._inner, self._indices = inner, as_ids(indices)
        self.size = len(self._indices)

    def fetch(self, ids: Ids) -> Any:
        return self._inner.fetch(self._indices[ids])


class ArrayRows(Dataset[Any]):
    """Dataset of the rows of nested arrays, for collate functions, which take a list of samples."""

    def __init__(self, data: Any) -> None:
        self._source = ArraySource(data)

    def __len__(self) -> int:
        return self._source.size

    def __getitem__(self, index: int) -> Any:
        return _first(self._source.fetch(np.array([index], np.int64)))


def is_arrays(data: Any) -> bool:
    """Return whether data consists of arrays or tensors: one, a list of them, or nested in tuples and dicts."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return data.ndim > 0
    if type(data) is list:
        # A list of tuples is a list of samples.
        return bool(data) and all(isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim for leaf in data)
    children = _children(data)
    return bool(children) and all(is_arrays(child) for _, child in children)


def _children(data: Any) -> list[tuple[Any, Any]]:
    if isinstance(data, Mapping):
        return list(data.items())
    return list(enumerate(data)) if isinstance(data, tuple | list) else []


def _leaves(data: Any, path: str = "data") -> Iterator[tuple[str, Any]]:
    if isinstance(data, torch.Tensor | np.ndarray):
        yield path, data
    for key, child in _children(data):
        yield from _leaves(child, f"{path}[{key!r}]")


def _reader(data: Any) -> Callable[[Ids, torch.Tensor], Any]:
    """Return a function that reads rows of nested arrays, with the nesting resolved once for all batches."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return _column(data)
    if isinstance(data, Mapping):
        fields = {key: _reader(child) for key, child in data.items()}
        return lambda ids, index: {key: read(ids, index) for key, read in fields.items()}
    parts = [_reader(child) for child in data]
    if hasattr(data, "_fields"):
        return lambda ids, index: type(data)(*[read(ids, index) for read in parts])
    return lambda ids, index: tuple([read(ids, index) for read in parts])


def _column(leaf: Any) -> Column:
    if isinstance(leaf, torch.Tensor):
        return _tensor_column(leaf.detach())
    _require_numbers(leaf)
    if leaf.flags.writeable and min(leaf.strides) >= 0:
        return _tensor_column(torch.from_numpy(leaf))
    # A tensor cannot share read-only or reversed memory, and a copy of the whole array may not fit.
    return lambda ids, index: torch.from_numpy(leaf.take(ids, axis=0))


def _tensor_column(tensor: torch.Tensor) -> Column:
    if tensor.device.type == "cpu":
        return lambda ids, index: tensor.index_select(0, index)
    return lambda ids, index: tensor.index_select(0, index.to(tensor.device))


def _require_numbers(leaf: np.ndarray[Any, Any]) -> None:
    try:
        torch.from_numpy(leaf[:1].copy())
    except TypeError:
        raise DataError(
            "arrays must have a dtype that torch supports",
            got=f"dtype {leaf.dtype}",
            remedy="convert it: array.astype('float32')",
        ) from None


def _first(data: Any) -> Any:
    """Return the first row of nested tensors."""
    if isinstance(data, torch.Tensor):
        return data[0]
    if isinstance(data, dict):
        return {key: _first(child) for key, child in data.items()}
    rows = [_first(child) for child in data]
    return type(data)(*rows) if hasattr(data, "_fields") else tuple(rows)


def _length_of(field: str, sample: Any) -> int:
    return len(sample[field])


def collated(samples: list[Any], collate: Collate, name: str) -> Any:
    """Collate samples into one batch; raise DataError with the name of the data if that fails."""
    try:
        return collate(samples)
    except Exception as error:
        raise DataError(
            f"samples of {name} must collate into one batch",
            got=f"{type(error).__name__}: {error}",
            remedy="make their shapes and types equal, pass collate=fn(list of samples), or return samples as "
            "dicts, whose fields are padded: {'tokens': ..., 'label': ...}",
        ) from error


def unreadable(name: str, sample: int, error: BaseException) -> DataError:
    """Return the error for a sample that cannot be read."""
    return DataError(
        f"every sample of {name} must be readable",
        got=f"{type(error).__name__}: {error} at sample {sample}",
        remedy=f"repair or remove sample {sample}",
    )


def check_source(source: Source, batch_size: int | None) -> int:
    """Return the global batch size, from the task's `batch_size` or the source; raise DataError if there is none.

    The error is also raised if the two differ, or if the source has less than one batch.
    """
    if batch_size is not None and source.batch_size not in (None, batch_size):
        raise DataError(
            f"the batch_size of the task and of its {source.sized_by} must be equal",
            got=f"{batch_size} and {source.batch_size}",
            remedy="set only one of them; both are the global batch size",
        )
    size = batch_size or source.batch_size
    if size is None:
        raise DataError(
            f"batch_size is required for data that is not a DataLoader ({source.name})",
            remedy="pass for example batch_size=32",
        )
    if source.size == 0:
        raise DataError(
            "data must have at least one sample", got=f"none in {source.name}", remedy="check its path or its filter"
        )
    if source.size is not None and source.size < size:
        raise DataError(
            f"{source.name} must have at least one batch",
            got=f"{counted(source.size, 'sample')} for a batch of {size}",
            remedy=f"pass batch_size={source.size} or less{_columns(source)}",
        )
    return size


def _columns(source: Source) -> str:
    """Return a hint for a tuple of lists, which is read as a list of samples but is usually meant as columns."""
    return (
        "; if these are columns, turn them into arrays: torch.tensor(...)" if source.name in ("tuple", "list") else ""
    )


def as_ids(values: Any) -> Ids:
    """Convert integers to an array of ids."""
    return np.asarray(values, dtype=np.int64)
