"""Conversion of DataLoaders to sources, with their dataset, collate function, workers, batch size and sampler."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..core import DataError
from .order import Ids, Order
from .randomness import OwnRandomness, mix
from .source import IndexedSource, Source, Window, as_ids


class SampledSource(IndexedSource):
    """Source that reads another one in the order of a DataLoader's sampler, which is seeded by (seed, epoch)."""

    def __init__(self, inner: IndexedSource, sampler: Any) -> None:
        self.name, self.max_workers = inner.name, inner.max_workers
        self._inner, self._sampler = inner, sampler
        self.size = len(sampler) if hasattr(sampler, "__len__") else len(self.order(0, 0, False))

    def order(self, seed: int, epoch: int, shuffle: bool) -> Order | Ids:
        return _ids(_drawn(self._sampler, seed, epoch), self._sampler)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        return self._inner.reader(seed, epoch)

    def fetch(self, ids: Ids) -> Any:
        return self._inner.fetch(ids)


class BatchedSource(SampledSource):
    """Source that reads another one in the global batches of a DataLoader's batch sampler."""

    def __init__(self, inner: IndexedSource, batch_sampler: Any) -> None:
        self.name, self.max_workers = inner.name, inner.max_workers
        self._inner, self._sampler = inner, batch_sampler
        batches = self._batches(0, 0)
        if _lists(batches) != _lists(self._batches(0, 0)):
            raise DataError(
                "a batch_sampler must return the same batches whenever it is iterated with the same seed",
                got=type(batch_sampler).__name__,
                remedy="pass batch_size and sampler to the DataLoader, or batch_sampler=list(batches)",
            )
        self.size, self._num_steps = sum(map(len, batches)), len(batches)
        self.batch_size = max(map(len, batches), default=None)

    def order(self, seed: int, epoch: int, shuffle: bool) -> Order | Ids:
        return np.concatenate([as_ids([]), *self._batches(seed, epoch)])

    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        fetch, first = self.reader(seed, epoch), 0
        for ids in self._batches(seed, epoch):
            rest = ids[max(0, start - first) :]
            if len(rest):
                yield Window(rest, fetch)
            first += len(ids)

    def num_steps(self, batch_size: int) -> int | None:
        return self._num_steps

    def _batches(self, seed: int, epoch: int) -> list[Ids]:
        return [_ids(batch, self._sampler) for batch in _drawn(self._sampler, seed, epoch)]


def loader_source(loader: DataLoader[Any], inner: Source) -> Source:
    """Return the source of a DataLoader, given the source of its dataset."""
    source = _in_loader_order(loader, inner)
    source.batch_size = source.batch_size or loader.batch_size
    source.workers = loader.num_workers
    source.drop_last = bool(loader.drop_last)
    source.worker_init = loader.worker_init_fn
    return source


def _in_loader_order(loader: DataLoader[Any], inner: Source) -> Source:
    if loader.batch_sampler is None:
        raise DataError(
            "a DataLoader must create the batches, so that they can be split over the replicas",
            got="batch_size=None",
            remedy="let the dataset return single samples, and pass DataLoader(..., batch_size=32)",
        )
    if not isinstance(inner, IndexedSource):
        return inner
    batching: Any = loader.batch_sampler
    if type(batching) is not BatchSampler:
        _require_whole(batching)
        return BatchedSource(inner, batching)
    _require_whole(batching.sampler)
    source = _sampled(inner, batching.sampler)
    source.batch_size = batching.batch_size
    return source


def _sampled(inner: IndexedSource, sampler: Any) -> Source:
    if type(sampler) is SequentialSampler:
        inner.shuffle = False
        return inner
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == inner.size:
        inner.shuffle = True
        return inner
    source = SampledSource(inner, sampler)
    source.shuffle = False
    return source


def _require_whole(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "a DataLoader must return global batches, which are then split over the replicas",
            got="a DistributedSampler",
            remedy="omit it: DataLoader(dataset, batch_size=GLOBAL, shuffle=True)",
        )


def _drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Return everything that a sampler yields in an epoch, which is the same on every replica and in every call."""
    key = mix(seed, epoch)
    if isinstance(getattr(sampler, "generator", None), torch.Generator):
        sampler.generator.manual_seed(key)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with OwnRandomness(key):
        return list(sampler)


def _ids(values: Any, sampler: Any) -> Ids:
    try:
        return as_ids(values)
    except (TypeError, ValueError) as error:
        raise DataError(
            "a sampler must return integers",
            got=f"{type(sampler).__name__} with {list(itertools.islice(values, 3))}",
            remedy="index the dataset by position",
        ) from error


def _lists(batches: list[Ids]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]
