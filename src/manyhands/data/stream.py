"""Source of streams, which have no known length: iterable datasets, other iterables, and generator functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .batch import SampleMarker
from .collate import collate as default_collate
from .order import Ids
from .randomness import OwnRandomness, mix
from .source import Collate, Source, Window, collated, unreadable


class StreamSource(Source):
    """Source of the samples of an iterable, in the order in which they arrive.

    Every replica iterates over the whole stream and collates its own part. The id of a sample is its position. Random
    draws of the stream are seeded by (seed, epoch), so that all replicas get the same stream.
    """

    max_workers = 1

    def __init__(self, make: Callable[[], Iterable[Any]], name: str, collate: Collate | None = None) -> None:
        self.name = name
        self._make = make
        self._collate = default_collate if collate is None else SampleMarker(collate)

    def windows(self, *, seed: int, epoch: int, shuffle: bool, start: int, batch_size: int) -> Iterator[Window]:
        randomness = OwnRandomness(mix(seed, epoch))
        with randomness:
            stream = iter(self._make())
            start = self._skip(stream, start)
        while True:
            with randomness:
                samples = self._take(stream, batch_size, start)
            if not samples:
                return
            ids = np.arange(start, start + len(samples), dtype=np.int64)
            yield Window(ids, partial(self._select, samples, start))
            start += len(samples)

    def fetch(self, ids: Ids) -> Any:
        stream = iter(self._make())
        return self._select(self._take(stream, int(ids.max()) + 1, 0), 0, ids)

    def _select(self, samples: list[Any], start: int, ids: Ids) -> Any:
        return collated([samples[i - start] for i in ids.tolist()], self._collate, self.name)

    def _skip(self, stream: Iterator[Any], count: int) -> int:
        """Read and drop `count` samples one by one, so that only one at a time is in memory; return `count`."""
        for position in range(count):
            self._take(stream, 1, position)
        return count

    def _take(self, stream: Iterator[Any], count: int, start: int) -> list[Any]:
        samples: list[Any] = []
        try:
            for _ in range(count):
                samples.append(next(stream))
        except StopIteration:
            pass
        except Exception as error:
            raise unreadable(self.name, start + len(samples), error) from error
        return samples
