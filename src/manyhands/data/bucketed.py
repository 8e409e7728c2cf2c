"""Bucketing: batches of samples with similar lengths, so that little padding is needed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core import DataError
from .order import Ids, Order, from_windows
from .randomness import mix
from .source import IndexedSource, as_ids

Length = str | Callable[[Any], int] | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class Bucketed:
    """Data and the lengths of its samples; created by `mh.data.bucketed`."""

    data: Any
    batch_size: int
    length: Length
    window: int
    _found: list[Ids] = field(default_factory=list)
    """The lengths once they are known, else empty; they are sent with the task, so that no rank reads all samples."""

    def __repr__(self) -> str:
        length: Any = self.length
        if callable(length):
            length = getattr(length, "__name__", type(length).__name__)
        elif not isinstance(length, str):
            length = f"{len(length)} numbers"
        return f"bucketed(a {type(self.data).__name__}, {self.batch_size}, length={length}, window={self.window})"

    def lengths(self, source: IndexedSource) -> Ids:
        """Return the length of every sample; if a function computes lengths, all samples are read once."""
        if not self._found:
            if isinstance(self.length, str):
                found = _lengths_in(self.length, source)
            else:
                found = source.lengths(self.length) if callable(self.length) else as_ids(self.length)
            self._check(found, source)
            self._found.append(found)
        return self._found[0]

    def _check(self, lengths: Ids, source: IndexedSource) -> None:
        if len(lengths) != source.size:
            raise DataError(
                f"lengths must have one value for every sample of {source.name}",
                got=f"{len(lengths)} lengths for {source.size} samples",
                remedy="pass a length for every sample",
            )
        if self.length is len and source.size > 1 and (lengths == lengths[0]).all():
            raise DataError(
                "bucketing needs samples of different lengths",
                got=f"length {lengths[0]} for every sample (measured by len)",
                remedy='pass length="tokens" for a column, or length=lambda sample: len(sample[0])',
            )


def bucketed(data: Any, batch_size: int, *, length: Length = len, window: int = 100) -> Bucketed:
    """Group data for `Task.data` into global batches of samples of similar length; each sample occurs once per epoch.

    Args:
        data: A dataset, files or arrays: any data with a known number of samples.
        batch_size: Number of samples in a global batch; the task need not repeat it.
        length: Function of a sample that returns its length, the name of a column, or the lengths themselves. For a
            function, every sample is read once before training.
        window: Number of batches whose samples are drawn at random together, sorted by length, and split into batches,
            which are then shuffled.

    The order depends only on the seed and the epoch, so a run can resume at any step, on any number of replicas.

    >>> import random
    >>> from manyhands.data import Cursor, Feed, as_source
    >>> texts = [{"tokens": [1] * random.Random(i).randint(1, 100)} for i in range(1000)]
    >>> def share_of_padding(data):
    ...     batches = [batch.data for batch in Feed(as_source(data), batch_size=20).epoch(Cursor())]
    ...     return 1 - sum(b.mask("tokens").sum() for b in batches) / sum(b["tokens"].numel() for b in batches)
    >>> bool(share_of_padding(texts) > 0.4)
    True
    >>> bool(share_of_padding(bucketed(texts, 20, length="tokens")) < 0.03)
    True
    """
    for name, value in (("batch_size", batch_size), ("window", window)):
        if not isinstance(value, int) or value < 1:
            raise DataError(f"{name} must be a whole number of at least 1", got=repr(value), remedy=f"pass {name}=32")
    if isinstance(length, str):
        _require_column(length, _columns_of(data))
    return Bucketed(data, batch_size, length, window)


def _lengths_in(column: str, source: IndexedSource) -> Ids:
    """Return the lengths of a column's values; raise DataError if there is no such column, or it has no lengths."""
    try:
        return source.lengths(column)
    except (LookupError, TypeError) as error:
        _require_column(column, _columns_of(source.samples([0])))
        raise DataError(
            "length must name a column whose values have a length",
            got=f"{column!r} ({type(error).__name__}: {error})",
            remedy="pass a function of a sample, or the lengths themselves",
        ) from error


def _columns_of(data: Any) -> list[str]:
    """Return the column names of a table, or the keys of samples that are dicts; empty if they are not known yet."""
    named = getattr(data, "column_names", None)
    if isinstance(named, list):
        return named
    first = data[0] if type(data) in (list, tuple) and data else data
    return [str(name) for name in first] if isinstance(first, Mapping) else []


def _require_column(name: str, columns: list[str]) -> None:
    """Raise DataError if `name` is not among the columns; an empty list means that the columns are not known yet."""
    if columns and name not in columns:
        close = difflib.get_close_matches(name, columns, n=1)
        raise DataError(
            f"length must be one of the columns {', '.join(columns)}",
            got=repr(name),
            remedy=f"did you mean {close[0]!r}?" if close else "name one of these, or pass a function of a sample",
        )


class BucketSource(IndexedSource):
    """Source that reads another one in an order in which the samples of a batch have similar lengths."""

    sized_by = "mh.data.bucketed"

    def __init__(self, inner: Any, data: Bucketed) -> None:
        if not isinstance(inner, IndexedSource):
            raise DataError(
                "bucketing needs a dataset with random access",
                got=f"{inner.name}, a stream",
                remedy="pass a dataset with __getitem__ and __len__, or mh.data.files(...)",
            )
        self.name, self.max_workers, self.size = inner.name, inner.max_workers, inner.size
        self.batch_size, self._inner, self._window = data.batch_size, inner, data.window
        self._lengths = data.lengths(inner)

    def order(self, seed: int, epoch: int, shuffle: bool) -> Any:
        inner = self._inner.order(seed, epoch, shuffle)
        key = mix(seed, epoch) if shuffle else None
        return BucketOrder(inner, self._lengths, self.batch_size or 1, self._window, key)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        return self._inner.reader(seed, epoch)

    def fetch(self, ids: Ids) -> Any:
        return self._inner.fetch(ids)

    def samples(self, ids: Sequence[int]) -> list[Any]:
        return self._inner.samples(ids)


class BucketOrder:
    """Order of an epoch that sorts another order by length, within windows of some batches.

    The batches of a window are shuffled by the seed `key`, or not shuffled if it is None.
    """

    def __init__(self, inner: Any, lengths: Ids, batch_size: int, window: int, key: int | None) -> None:
        self._inner, self._lengths, self._batch_size, self._key = inner, lengths, batch_size, key
        self._rows = window * batch_size
        self._sorted: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, positions: slice) -> Ids:
        return from_windows(positions, len(self), self._bucket_at)

    def _bucket_at(self, position: int) -> tuple[int, Ids]:
        number = position // self._rows
        if self._sorted[0] != number:
            ids = self._inner[number * self._rows : (number + 1) * self._rows]
            ids = ids[np.argsort(self._lengths[ids], kind="stable")]
            self._sorted = number, ids if self._key is None else self._shuffled(ids, number, self._key)
        return number * self._rows, self._sorted[1]

    def _shuffled(self, ids: Ids, number: int, key: int) -> Ids:
        """Shuffle the batches of a window; an incomplete batch stays last, so that all others stay whole."""
        num_batches = len(ids) // self._batch_size
        whole = ids[: num_batches * self._batch_size].reshape(num_batches, self._batch_size)
        order = Order(num_batches, key, number, True)[:]
        return np.concatenate([whole[order].reshape(-1), ids[num_batches * self._batch_size :]])
