"""The feed: batches of one replica, in an order that no number of replicas changes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch

from ..core import DataError
from .arrays import ArraySource
from .batch import Batch, Cursor, to_device
from .order import Ids
from .prefetch import DeviceCopy, Prefetcher
from .resident import Resident, fits
from .shares import Share, share_of
from .source import Source, Window
from .workers import read_in_workers

CPU = torch.device("cpu")


class Feed:
    """Gives one replica its part of every global batch.

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
        self.source, self.batch_size, self.seed = source, batch_size, seed
        self.shuffle = shuffle if source.shuffle is None else source.shuffle
        self.replica, self.num_replicas, self.accumulate = replica, num_replicas, accumulate
        self.device, self.dtype = device, dtype
        self.workers = self._num_workers(workers)
        self.waited = 0.0
        """Seconds that the consumer waited for input."""
        self._computed = 0.0
        self._open: list[Iterator[Batch]] = []
        self._resident: Resident | None = None

    def num_steps(self) -> int | None:
        """Global batches in an epoch; None for a stream of unknown length."""
        num_steps = self.source.num_steps(self.batch_size)
        if num_steps is None or not self.source.drop_last or not self.source.size:
            return num_steps
        return min(num_steps, self.source.size // self.batch_size)

    def peek(self, num_samples: int) -> Any:
        """At most so many of the first samples, on the device; the feed stands where it stood."""
        windows = self.source.windows(
            seed=self.seed,
            epoch=0,
            shuffle=self.shuffle,
            start=0,
            batch_size=min(num_samples, self.batch_size),
        )
        window = next(windows)
        return to_device(window.fetch(window.ids[:num_samples]), self.device, dtype=self.dtype)

    @property
    def limit(self) -> str:
        """What limits the speed so far: "input" if more than a tenth of the time went into waiting for it."""
        return "input" if self.waited > 0.1 * (self.waited + self._computed) else "compute"

    def epoch(self, cursor: Cursor) -> Iterator[Batch]:
        """The batches from the cursor to the end of its epoch."""
        batches = self._batches(cursor)
        self._open.append(batches)
        try:
            yield from self._timed(batches)
        finally:
            _close(batches)
            self._open.remove(batches)

    def close(self) -> None:
        """Ends what is being read; an epoch under way ends with the batch that it gave last."""
        for batches in self._open:
            _close(batches)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        while True:
            asked = perf_counter()
            batch = next(batches, None)
            given = perf_counter()
            self.waited += given - asked
            if batch is None:
                return
            yield batch
            self._computed += perf_counter() - given

    def _batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Batches on the device, by the fastest way that is safe."""
        if self._resident is None and isinstance(self.source, ArraySource) and fits(self.source.num_bytes, self.device):
            self._resident = Resident(self.source.arrays, self.device, self.dtype)
        if self._resident is not None:
            return self._on_device(cursor, self._resident)
        on_host = self._on_host(cursor)
        # The user's code may draw from global generators, so it never runs in a thread beside the network.
        if self.device.type != "cpu" and (self.workers or not self.source.max_workers):
            return self._ahead(on_host)
        if self.device.type == "cpu" and self.dtype is None:
            return on_host
        return self._moved(on_host)

    def _on_device(self, cursor: Cursor, resident: Resident) -> Iterator[Batch]:
        """Batches gathered on the device, from arrays that stay there."""
        position = cursor.position
        for window, wanted, index in resident.ids(self._windows(cursor), self._wanted):
            position += len(window.ids)
            share = self._share(window)
            ids = wanted if share.sizes and sum(share.sizes) else wanted[:0]
            yield resident.batch(index, ids, share, Cursor(cursor.epoch, position))

    def _on_host(self, cursor: Cursor) -> Iterator[Batch]:
        if self.workers:
            return read_in_workers(partial(self._read, cursor), self.workers, self.source)
        return self._read(cursor)

    def _read(self, cursor: Cursor, first: int = 0, step: int = 1) -> Iterator[Batch]:
        """Batches number first, first + step, ... counted from the cursor."""
        position = cursor.position
        for number, window in zip(count(), self._windows(cursor)):
            position += len(window.ids)
            if number % step == first:
                yield self._batch(window, Cursor(cursor.epoch, position))

    def _windows(self, cursor: Cursor) -> Iterator[Window]:
        """The global batches from the cursor on."""
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

    def _share(self, window: Window) -> Share:
        return share_of(len(window.ids), self.accumulate, self.replica, self.num_replicas)

    def _wanted(self, window: Window) -> Ids:
        """This replica's samples; a borrowed one where it has none."""
        ids = window.ids[self._share(window).rows]
        return ids if len(ids) else window.ids[:1]

    def _batch(self, window: Window, cursor: Cursor) -> Batch:
        share = self._share(window)
        return Batch(
            window.fetch(self._wanted(window)), share.sizes, share.global_sizes, window.ids[share.rows], cursor
        )

    def _moved(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            yield replace(batch, data=to_device(batch.data, self.device, dtype=self.dtype))

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        copy = DeviceCopy(self.device, self.dtype)
        sent = ((batch, *copy.send(batch.data)) for batch in batches)
        ahead = Prefetcher(sent, room=lambda item, depth: copy.room(item[1], depth))
        try:
            for batch, data, arrival in ahead:
                yield replace(batch, data=copy.receive(data, arrival))
        finally:
            ahead.close()

    def _num_workers(self, asked: int | None) -> int:
        wanted = asked if asked is not None else self.source.workers
        if wanted is None:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            wanted = 0 if self.device.type == "cpu" else min(4, max(1, cores // self.num_replicas))
        return min(wanted, self.source.max_workers)


def _close(batches: Iterator[Batch]) -> None:
    close = getattr(batches, "close", None)
    if close is not None:
        close()


def _require_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise DataError(f"{name} must be at least 1", got=value, remedy=f"pass {name}=1 or more")
