"""Metrics of a version: request counts, latencies and batch sizes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

from .batcher import RequestBatch

_FIRST, _RATIO = 20e-6, 1.08
BOUNDS = [_FIRST * _RATIO**i for i in range(200)]
"""Latency bounds in seconds, 8% apart, from 20 microseconds to a minute and a half; percentiles are accurate to 8%."""
SIZE_BOUNDS = [2**i for i in range(11)]


class Histogram:
    """Histogram with fixed bounds; cheap enough for every request."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num(self) -> int:
        """Number of values counted."""
        return sum(self.counts)

    def copy(self) -> list[int]:
        """Return a copy of the counts, to compare with later ones."""
        return list(self.counts)

    def percentile(self, share: float, since: Sequence[int] | None = None) -> float:
        """Return the value below which this share lies, of all values or of those since a copy; NaN if there are none.

        >>> histogram = Histogram([1.0, 2.0])
        >>> histogram.add(0.5)
        >>> histogram.percentile(0.99)
        1.0
        """
        counts = self.counts if since is None else [now - then for now, then in zip(self.counts, since, strict=True)]
        num = sum(counts)
        if not num:
            return math.nan
        seen, wanted = 0, math.ceil(share * num)
        for bound, count in zip([*self.bounds, math.inf], counts, strict=True):
            seen += count
            if seen >= wanted:
                return bound
        return math.inf

    def cumulated(self, every: int = 1) -> Iterator[tuple[float, int]]:
        """Yield bounds with the number of values below, as Prometheus expects, the infinite bound last."""
        seen = 0
        for index, count in enumerate(self.counts[:-1]):
            seen += count
            if index % every == every - 1:
                yield self.bounds[index], seen
        yield math.inf, self.num


class VersionMetrics:
    """Counters and histograms of a version."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        """Requests by outcome: OK, or the code of the refusal."""
        self.latency = Histogram(BOUNDS)
        self.batches = Histogram(SIZE_BOUNDS)
        self.compute = 0.0
        """Seconds that replicas computed."""

    def count(self, code: str, seconds: float) -> None:
        """Count a request with its outcome."""
        self.codes[code] += 1
        if code == "OK":
            self.latency.add(seconds)

    def count_batch(self, batch: RequestBatch, seconds: float) -> None:
        """Count a batch."""
        self.batches.add(batch.rows)
        self.compute += seconds

    @property
    def num_requests(self) -> int:
        """Requests so far."""
        return sum(self.codes.values())
