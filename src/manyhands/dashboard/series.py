"""Series: a curve of bounded size, whatever its number of points."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 1000
"""Maximum number of intervals; beyond it, neighbours are merged."""


class Series:
    """Values by step: the mean of every interval, and the lowest and highest value within it.

    An interval is one step until there are too many; then intervals are merged in pairs, so that any number of points
    takes the same memory and the same time to draw. A value that is not finite is omitted.

    >>> series = Series(most=4)
    >>> for step in range(8):
    ...     series.add(step, float(step))
    >>> series.stride, series.to_dict()["x"], series.to_dict()["mean"]
    (2, [1.0, 3.0, 5.0, 7.0], [0.5, 2.5, 4.5, 6.5])
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self.stride = 1
        """Number of points per interval."""
        self.num = 0
        """Number of points ever added."""
        self.last = math.nan
        self._first, self._x, self._sum, self._count = array("d"), array("d"), array("d"), array("q")
        self._low, self._high = array("d"), array("d")

    def add(self, x: float, value: float | None) -> None:
        """Append a point."""
        if value is not None and math.isfinite(value):
            self._take(float(x), float(x), float(value), 1, float(value), float(value))
            self.last = value

    def extend(self, xs: Sequence[float], values: Sequence[float | None]) -> None:
        """Append points, many at once if they fall into one interval."""
        found = [value for value in values if value is not None and math.isfinite(value)]
        if len(found) < len(values):
            xs = [x for x, value in zip(xs, values, strict=True) if value is not None and math.isfinite(value)]
        at = 0
        while at < len(found):
            free = self.stride - (self._count[-1] if self._count else 0)
            some = found[at : at + (free if free > 0 else self.stride)]
            self._take(xs[at], xs[at + len(some) - 1], sum(some), len(some), min(some), max(some))
            self.last = some[-1]
            at += len(some)

    def merge(self, groups: Iterable[tuple[float, float, float, int, float, float]], last: float) -> None:
        """Append merged points: first and last x, and the sum, number, minimum and maximum of the values of each."""
        for group in groups:
            count = group[3]
            if count > 0 and all(map(math.isfinite, group)):
                while self.stride < count:
                    self._join()
                self._take(*group)
                self.last = last

    def _take(self, first: float, x: float, total: float, count: int, low: float, high: float) -> None:
        """Add points that belong to one interval, either the last interval or a new one."""
        self.num += count
        if len(self._x) >= self._most and self._count[-1] >= self.stride:
            self._join()
        if not self._count or self._count[-1] >= self.stride:
            self._first.append(first)
            self._x.append(x)
            self._sum.append(total)
            self._count.append(count)
            self._low.append(low)
            self._high.append(high)
            return
        self._x[-1] = x
        self._sum[-1] += total
        self._count[-1] += count
        self._low[-1] = min(self._low[-1], low)
        self._high[-1] = max(self._high[-1], high)

    def forget_after(self, x: float) -> None:
        """Drop points after a step, because these steps are repeated."""
        kept = bisect_right(self._first, x)
        for column in (self._first, self._x, self._sum, self._count, self._low, self._high):
            del column[kept:]
        if kept:
            self._x[-1] = min(self._x[-1], x)
            self.last = self._sum[-1] / self._count[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return columns for a chart; low and high only if intervals have several points."""
        mean = [total / count for total, count in zip(self._sum, self._count, strict=True)]
        columns: dict[str, Any] = {"x": list(self._x), "mean": mean}
        if self.stride > 1:
            columns |= {"low": list(self._low), "high": list(self._high)}
        return columns

    def __len__(self) -> int:
        return len(self._x)

    def _join(self) -> None:
        """Merge neighbouring intervals in pairs; one without a neighbour stays and is filled up."""
        even = len(self._x) // 2 * 2
        left, right = slice(0, even, 2), slice(1, even, 2)
        rest = slice(even, None)
        self._first = self._first[left] + self._first[rest]
        self._x = self._x[right] + self._x[rest]
        self._sum = array("d", map(sum, zip(self._sum[left], self._sum[right], strict=True))) + self._sum[rest]
        self._count = array("q", map(sum, zip(self._count[left], self._count[right], strict=True))) + self._count[rest]
        self._low = array("d", map(min, self._low[left], self._low[right])) + self._low[rest]
        self._high = array("d", map(max, self._high[left], self._high[right])) + self._high[rest]
        self.stride *= 2
