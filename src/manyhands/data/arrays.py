"""Sources of data in memory: numpy arrays and tensors, single or nested, each read by one index_select per batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..core import DataError
from .order import Ids
from .source import IndexedSource, as_ids

Column = Callable[[Ids, torch.Tensor], torch.Tensor]
"""Function that reads rows of one array, given their ids as an array and as a tensor."""


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
