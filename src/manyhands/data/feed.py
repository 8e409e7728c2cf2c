"""Feed: the batches of one replica, in a sample order that does not depend on the number of replicas."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch

from ..core import DataError, counted
from .adaptation import Adaptation
from .batch import Batch, Cursor, to_device
from .batch_split import ReplicaShare, share_of
from .device_resident import Resident, fits
from .line_samples import Line, LineSampler, sampled
from .order import Ids
from .prefetch import DeviceCopy, Prefetcher
from .source import ArraySource, IndexedSource, Source, Window
from .workers import read_in_workers

CPU = torch.device("cpu")
FELT = 0.1
"""Waiting for data is reported to the user if it takes more than this fraction of the time."""
SATURATED = 0.8
"""Copying is the bottleneck if the copy engine is busy for more than this fraction of the time."""


@dataclass(frozen=True)
class ReplicaReader:
    """One replica's view of a source, in the training process or in a worker: global batches, and its rows of them."""

    source: Source
    batch_size: int
    seed: int
    shuffle: bool
    replica: int
    num_replicas: int
    accumulate: int
    weights: tuple[int, ...] | None = None
    """The replicas' shares of a batch, in proportion; None for equal shares."""

    def windows(self, cursor: Cursor) -> Iterator[Window]:
        """Yield the global batches from the cursor to the end of its epoch, without reading them."""
        windows = self.source.windows(
            seed=self.seed,
            epoch=cursor.epoch,
            shuffle=self.shuffle,
            start=cursor.position,
            batch_size=self.batch_size,
        )
        for window in windows:
            if self.source.drop_last and len(window.ids) < self.batch_size:
                return
            yield window

    def share(self, window: Window) -> ReplicaShare:
        """Return this replica's part of a global batch."""
        return share_of(len(window.ids), self.accumulate, self.replica, self.num_replicas, self.weights)

    def wanted(self, window: Window) -> Ids:
        """Return the ids of this replica's samples, or of one padding row if the replica has none."""
        ids = window.ids[self.share(window).rows]
        return ids if len(ids) else window.ids[:1]

    def batch(self, window: Window, cursor: Cursor) -> Batch:
        """Read this replica's part of a global batch, on the host."""
        share = self.share(window)
        return Batch(window.fetch(self.wanted(window)), share.sizes, share.global_sizes, window.ids[share.rows], cursor)

    def read(self, cursor: Cursor, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """Read and yield this replica's batches number first, first + step, ..., counted from the cursor."""
        position = cursor.position
        for number, window in zip(count(), self.windows(cursor)):
            position += len(window.ids)
            if number % step == first:
                yield self.batch(window, Cursor(cursor.epoch, position))


@dataclass
class FeedTiming:
    """Seconds that the consumer of a feed, the training loop, spent on waiting, copying and computing."""

    input: float = 0.0
    """Seconds of waiting for data to be read."""
    copy: float = 0.0
    """Seconds of waiting for data to be copied or cast."""
    compute: float = 0.0
    """Seconds between two batches, and of waiting while the accelerator was still busy."""
    copying: float = 0.0
    """Seconds in which the accelerator's copy engine was busy, whether or not the consumer waited for it."""

    @property
    def total(self) -> float:
        """All seconds of the consumer."""
        return self.input + self.copy + self.compute

    @property
    def limit(self) -> str:
        """What limits the speed: "input", "copy" or "compute".

        >>> FeedTiming(input=3.0, compute=7.0).limit, FeedTiming(input=0.1, compute=9.0).limit
        ('input', 'compute')
        >>> FeedTiming(copy=2.0, compute=7.0).limit
        'copy'
        """
        if self.total and self.copying > SATURATED * self.total:
            return "copy"
        if self.input + self.copy <= FELT * self.total:
            return "compute"
        return "copy" if self.copy > self.input else "input"

    def describe_limit(self, workers: int) -> str:
        """Return a message for the user if data is the bottleneck, else an empty string.

        >>> FeedTiming(input=3.0, compute=7.0).describe_limit(workers=2)
        'input is the bottleneck: 30% of the time was spent waiting for data, which 2 worker processes read'
        """
        readers = "this process reads" if not workers else f"{workers} worker process{'es' * (workers > 1)} read"
        share = (self.input + self.copy) / self.total if self.total else 0.0
        texts = {
            "input": f"input is the bottleneck: {share:.0%} of the time was spent waiting for data, which {readers}",
            "copy": "copying to the device is the bottleneck: smaller dtypes (uint8, bf16) would be faster",
        }
        return texts.get(self.limit, "")


class Feed:
    """Iterate over one replica's part of every global batch.

    >>> from .sources import as_source
    >>> feed = Feed(as_source(torch.arange(5)), batch_size=2, shuffle=False)
    >>> [batch.data.tolist() for batch in feed.epoch(Cursor())]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        replica: int = 0,
        num_replicas: int = 1,
        accumulate: int = 1,
        device: torch.device = CPU,
        workers: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _require_at_least_1(batch_size=batch_size, num_replicas=num_replicas, accumulate=accumulate)
        assert 0 <= replica < num_replicas, "a replica's number is below the number of replicas"
        self.source, self.batch_size, self.device, self.dtype = source, batch_size, device, dtype
        is_shuffled = shuffle if source.shuffle is None else source.shuffle
        self._reader = ReplicaReader(source, batch_size, seed, is_shuffled, replica, num_replicas, accumulate)
        self.workers = self._num_workers(workers)
        self.pace = FeedTiming()
        """The consumer's seconds of waiting for data, copying and computing."""
        self._adaptation = Adaptation(self._most_workers(), settled=not self._may_adapt(workers))
        self._last = (0.0, 0.0)
        """Seconds of waiting for the last finished batch, and of computing on it."""
        self._open: list[Iterator[Batch]] = []
        self._is_redivided = False
        self._resident: Resident | None = None

    def num_steps(self) -> int | None:
        """Return the number of global batches in an epoch; None for a stream of unknown length."""
        num_steps = self.source.num_steps(self.batch_size)
        if num_steps is None or not self.source.drop_last or not self.source.size:
            return num_steps
        return min(num_steps, self.source.size // self.batch_size)

    def peek(self, num_samples: int) -> Any:
        """Return at most `num_samples` of the first samples, on the device, without moving the feed's position."""
        windows = self.source.windows(
            seed=self._reader.seed,
            epoch=0,
            shuffle=self._reader.shuffle,
            start=0,
            batch_size=min(num_samples, self.batch_size),
        )
        window = next(windows)
        return to_device(window.fetch(window.ids[:num_samples]), self.device, dtype=self.dtype)

    @property
    def waited(self) -> float:
        """Seconds that the consumer waited for data."""
        return self.pace.input + self.pace.copy

    @property
    def limit(self) -> str:
        """What limits the speed so far: "input", "copy" or "compute"."""
        return self.pace.limit

    def describe_limit(self) -> str:
        """Return a message for the user if data is the bottleneck so far, else an empty string."""
        return self.pace.describe_limit(self.workers)

    def epoch(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield this replica's batches from the cursor to the end of its epoch, on the device."""
        going_on = True
        while going_on:
            batches = self._batches(cursor)
            self._open.append(batches)
            going_on = False
            try:
                for batch in self._timed(batches):
                    yield batch
                    cursor = batch.cursor
                    is_adapted = not self._adaptation.settled and self._adapt()
                    if (is_adapted or self._is_redivided) and batches in self._open:
                        self._is_redivided = False
                        # No batch is lost: the new readers start after the last batch that was yielded.
                        going_on = True
                        break
            finally:
                self._end(batches)

    @property
    def weights(self) -> tuple[int, ...] | None:
        """The weights by which batches are divided over the replicas; None for equal shares."""
        return self._reader.weights

    def divide_by(self, weights: tuple[int, ...]) -> None:
        """Divide global batches over the replicas in proportion to weights, from the next batch on.

        All replicas must call this after the same batch. The samples of a global batch and their order stay the same.
        """
        self._reader = replace(self._reader, weights=weights)
        self._is_redivided = True

    def plan(self, cursor: Cursor) -> Iterator[tuple[Ids, Cursor]]:
        """Yield the sample ids of every global batch from the cursor to the end of its epoch, without reading them."""
        position = cursor.position
        for window in self._reader.windows(cursor):
            position += len(window.ids)
            yield window.ids, Cursor(cursor.epoch, position)

    def read(self, ids: Ids, epoch: int) -> Batch:
        """Read samples by their ids as one batch without splitting it; the source must be an `IndexedSource`."""
        assert isinstance(self.source, IndexedSource)
        share = share_of(len(ids), self._reader.accumulate, 0, 1)
        data = to_device(self.source.reader(self._reader.seed, epoch)(ids), self.device, dtype=self.dtype)
        return Batch(data, share.sizes, share.global_sizes, ids, Cursor(epoch))

    def sample_lines(self, seconds: float) -> Counter[Line]:
        """Read batches of the first epoch for some seconds; return how often each line of user code was seen to run."""
        read, sampler = partial(self._reader.read, Cursor()), LineSampler()
        if self.workers:
            batches = read_in_workers(read, self.workers, self.source, sampler.counts)
        else:
            batches = sampled(read(), sampler)
        until = perf_counter() + seconds
        try:
            for _ in batches:
                if perf_counter() > until:
                    break
        finally:
            _close(batches)
        return sampler.counts

    def part(self, window: Window) -> Batch:
        """Return this replica's part of a global batch, on the device, without moving the feed's position."""
        batch = self._reader.batch(window, Cursor())
        return replace(batch, data=to_device(batch.data, self.device, dtype=self.dtype))

    def close(self) -> None:
        """Stop reading; an iteration in progress ends after the batch that it yielded last."""
        for batches in tuple(self._open):
            self._end(batches)

    def _end(self, batches: Iterator[Batch]) -> None:
        _close(batches)
        if batches in self._open:
            self._open.remove(batches)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        pace = self.pace
        while True:
            before = pace.copy + pace.compute
            asked = perf_counter()
            batch = next(batches, None)
            given = perf_counter()
            # Readers have accounted for copying and device work; the remaining time was spent waiting for input.
            pace.input += max(0.0, given - asked - (pace.copy + pace.compute - before))
            if batch is None:
                return
            yield batch
            computed = perf_counter() - given
            pace.compute += computed
            self._last = given - asked, computed

    def _adapt(self) -> bool:
        """Change the number of workers, to try another number or to end a trial; return whether it changed."""
        waited, computed = self._last
        wanted = self._adaptation.after(waited=waited, computed=computed, workers=self.workers)
        if wanted is not None:
            self.workers = wanted
        return wanted is not None

    def _batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Return an iterator of batches on the device, by the fastest method that is safe for the source."""
        if self._resident is None and isinstance(self.source, ArraySource) and fits(self.source.num_bytes, self.device):
            self._resident = Resident(self.source.arrays, self.device, self.dtype)
        if self._resident is not None:
            return self._on_device(cursor, self._resident)
        read = partial(self._reader.read, cursor)
        on_host = read_in_workers(read, self.workers, self.source) if self.workers else read()
        # User code may draw from global random generators, so it must not run in a thread beside the network.
        if self.device.type != "cpu" and (self.workers or not self.source.max_workers):
            return self._ahead(on_host)
        if self.device.type == "cpu" and self.dtype is None:
            return on_host
        return self._moved(on_host)

    def _on_device(self, cursor: Cursor, resident: Resident) -> Iterator[Batch]:
        """Yield batches that are gathered on the device from arrays that were copied there once."""
        position = cursor.position
        for window, wanted, index in resident.ids(self._reader.windows(cursor), self._reader.wanted):
            position += len(window.ids)
            share = self._reader.share(window)
            ids = wanted if share.sizes and sum(share.sizes) else wanted[:0]
            yield resident.batch(index, ids, share, Cursor(cursor.epoch, position))

    def _moved(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            began = perf_counter()
            data = to_device(batch.data, self.device, dtype=self.dtype)
            self.pace.copy += perf_counter() - began
            yield replace(batch, data=data)

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        copy, pace = DeviceCopy(self.device, self.dtype), self.pace
        ahead = Prefetcher(
            copy.sent(batches), has_memory=lambda item, depth: copy.has_memory(item[1], depth), is_idle=copy.when_idle
        )
        starved = hidden = copying = 0.0
        try:
            for batch, data, arrival in ahead:
                pace.compute += ahead.hidden - hidden
                pace.copy += (ahead.waited - starved) * copy.share
                pace.copying += copy.seconds - copying
                starved, hidden, copying = ahead.waited, ahead.hidden, copy.seconds
                yield replace(batch, data=copy.receive(data, arrival))
        finally:
            ahead.close()

    def crowding(self) -> str:
        """Return a notice if there are more worker processes than cores; empty otherwise."""
        cores = _num_cores()
        if self.workers <= cores:
            return ""
        text = f"{self.workers} worker processes read the data on {counted(cores, 'core')}, which is rarely faster"
        return f"{text} than {cores}; pass workers={cores} to mh.Task or num_workers={cores} to the DataLoader"

    def _num_workers(self, asked: int | None) -> int:
        wanted = asked if asked is not None else self.source.workers
        if wanted is None:
            wanted = 0 if self.device.type == "cpu" else min(4, self._most_workers())
        return min(wanted, self.source.max_workers)

    def _most_workers(self) -> int:
        """Return the maximum number of workers: this replica's share of the CPU cores."""
        return min(self.source.max_workers, max(1, _num_cores() // self._reader.num_replicas))

    def _may_adapt(self, asked: int | None) -> bool:
        """Return whether the feed may change the number of workers: not if the user set it, and not for streams."""
        is_open = asked is None and self.source.workers is None and self._most_workers() > 0
        return is_open and isinstance(self.source, IndexedSource)


def _close(batches: Iterator[Batch]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _require_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name} must be at least 1", got=repr(value), remedy=f"pass {name}=1 or more")
