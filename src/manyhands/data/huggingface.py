"""Sources of Hugging Face datasets: columns of numbers and strings are read as Arrow tables, others by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core import DataError
from .arrow import Null, table_of
from .map_style import MapSource
from .order import Ids
from .source import Collate, IndexedSource, Source, Window, unreadable
from .stream import StreamSource

LISTS = ("List", "LargeList", "Sequence")
PLAIN = ("Value", "ClassLabel")
CHUNK = 10_000


def is_huggingface(data: Any) -> bool:
    """Return whether data is a `datasets.Dataset` or `IterableDataset`, without importing the package."""
    return any(
        base.__module__.partition(".")[0] == "datasets" and base.__name__ in ("Dataset", "IterableDataset")
        for base in type(data).__mro__
    )


def is_splits(data: Any) -> bool:
    """Return whether data is a `datasets.DatasetDict` or `IterableDatasetDict`: several datasets by name."""
    return any(
        base.__module__.partition(".")[0] == "datasets" and base.__name__ in ("DatasetDict", "IterableDatasetDict")
        for base in type(data).__mro__
    )


def refuse_splits(data: Any, collate: Collate | None) -> Source:
    """Raise DataError for several datasets by name, of which the user must choose one."""
    first = "train" if "train" in data else next(iter(data), "train")
    raise DataError(
        "data must be one dataset",
        got=f"{type(data).__name__} of {', '.join(map(str, data)) or 'none'}",
        remedy=f"pass data[{first!r}]",
    )


def huggingface_source(data: Any, collate: Collate | None) -> Source:
    """Return the source of a Hugging Face dataset."""
    if not hasattr(data, "__len__"):
        return ShuffledStream(data, collate)
    if collate is not None:
        return RowSource(data, collate)
    if _is_plain(data):
        return ArrowSource(data)
    # Without a format, images and similar features are objects that cannot be batched.
    return RowSource(data.with_format("torch") if data.format["type"] is None else data)


class ShuffledStream(StreamSource):
    """Source of an iterable dataset of Hugging Face, which is reshuffled for every epoch if it shuffles."""

    def __init__(self, data: Any, collate: Collate | None) -> None:
        self._data = data if collate is not None else data.with_format("torch")
        super().__init__(lambda: self._data, "IterableDataset", collate)

    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        self._data.set_epoch(epoch)
        return super().windows(seed=seed, epoch=epoch, shuffle=shuffle, start=start, batch_size=batch_size)


class RowSource(MapSource):
    """Source of a dataset whose samples are read by code: a transform, image decoding, or a user's collate function."""

    def lengths(self, length: str | Callable[[Any], int]) -> Ids:
        return _column_lengths(self._dataset, length) if isinstance(length, str) else super().lengths(length)


class ArrowSource(IndexedSource):
    """Source of a dataset of strings, numbers and lists of numbers.

    Numbers become int64 or float32, as in the dataset's format "torch".
    """

    max_workers = 0

    def __init__(self, data: Any) -> None:
        self.name, self.size = "Dataset", len(data)
        self._data = data
        self._arrow = data.with_format("arrow", columns=data.format["columns"])
        self._types = {name: _type(data.features[name]) for name in data.format["columns"]}

    def fetch(self, ids: Ids) -> Any:
        try:
            return table_of(self._arrow[ids.tolist()], self._types).batch()
        except Null as null:
            raise unreadable(
                self.name, int(ids[null.row]), ValueError(f"the column {null.column!r} has no value")
            ) from None
        except ValueError as error:
            raise unreadable(self.name, int(ids[0]), error) from error

    def samples(self, ids: Sequence[int]) -> list[Any]:
        return self._data.__getitems__(list(ids))  # type: ignore[no-any-return]

    def lengths(self, length: str | Callable[[Any], int]) -> Ids:
        return _column_lengths(self._data, length) if isinstance(length, str) else super().lengths(length)


def _column_lengths(data: Any, column: str) -> Ids:
    """Return the length of every value of one column, without reading other columns."""
    tables = data.with_format("arrow", columns=[column]).iter(batch_size=CHUNK)
    return np.concatenate([table_of(table, {}).columns[column].lengths() for table in tables])


def _is_plain(data: Any) -> bool:
    form = data.format
    if form["type"] not in (None, "torch", "numpy") or form["format_kwargs"]:
        return False
    return all(_kind(data.features[name]) in PLAIN for name in form["columns"])


def _kind(feature: Any) -> str:
    """Return the class name of a feature, or of the items if it is a list; "nested" for lists of anything else."""
    if type(feature).__name__ in LISTS and hasattr(feature, "feature"):
        inner = type(feature.feature).__name__
        return inner if inner in PLAIN else "nested"
    return type(feature).__name__


def _type(feature: Any) -> str:
    dtype = feature.feature.dtype if type(feature).__name__ in LISTS else feature.dtype
    if dtype.startswith(("int", "uint")):
        return "int64"
    return "float32" if dtype.startswith("float") else ""
