"""Source of map-style datasets, which have `dataset[i]` and `len(dataset)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .batch import SampleMarker
from .collate import collate as default_collate
from .order import Ids
from .randomness import SampleRandomness, mix
from .source import Collate, IndexedSource, collated, unreadable


class MapSource(IndexedSource):
    """Source of a dataset with `__getitem__` and `__len__`; samples are read by its `__getitems__` if it has one."""

    max_workers = 64

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self.name = type(dataset).__name__
        self.size = len(dataset)
        self._dataset = dataset
        self._many: Callable[[Sequence[int]], list[Any]] | None = getattr(dataset, "__getitems__", None)
        self._collate = default_collate if collate is None else SampleMarker(collate)
        self._randomness = SampleRandomness()

    def fetch(self, ids: Ids) -> Any:
        return collated(self.samples(ids.tolist()), self._collate, self.name)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        return partial(self._fetch_reproducibly, mix(seed, epoch))

    def _fetch_reproducibly(self, key: int, ids: Ids) -> Any:
        samples = self._randomness.read(key, ids.tolist(), self.samples)
        return collated(samples, self._collate, self.name)

    def samples(self, ids: Sequence[int]) -> list[Any]:
        return self._read_each(ids) if self._many is None else self._read_many(self._many, ids)

    def _read_each(self, ids: Sequence[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for i in ids:
                samples.append(self._dataset[i])
        except Exception as error:
            raise unreadable(self.name, ids[len(samples)], error) from error
        return samples

    def _read_many(self, many: Callable[[Sequence[int]], list[Any]], ids: Sequence[int]) -> list[Any]:
        try:
            return many(ids)
        except Exception as error:
            raise unreadable(self.name, _culprit(many, ids), error) from error


def _culprit(many: Callable[[Sequence[int]], list[Any]], ids: Sequence[int]) -> int:
    """Return the first sample that cannot be read alone; the first of all if each of them can."""
    for i in ids:
        try:
            many([i])
        except Exception:
            return i
    return ids[0]
