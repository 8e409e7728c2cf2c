"""Series: a curve of bounded size for any number of points."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

MOST = 1000
"""Maximum number of intervals of a curve; if there are more, neighbours are merged."""


class Series:
    """A curve as intervals of steps, each with the mean, the lowest and the highest of its values.

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
        """Append a point; None and values that are not finite are ignored."""
        if value is not None and math.isfinite(value):
            self._take(float(x), float(x), float(value), 1, float(value), float(value))
            self.last = value

    def extend(self, xs: Sequence[float], values: Sequence[float | None]) -> None:
        """Append points, which is faster than calling `add` for each of them."""
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
        """Add `count` points that fit into the last interval, or begin a new interval with them if it is full.

        Args:
            first: Step of the first point.
            x: Step of the last point.
            total: Sum of the values.
            count: Number of points.
            low: Lowest value.
            high: Highest value.
        """
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
        """Drop the intervals that begin after a step, because the following steps are repeated."""
        kept = bisect_right(self._first, x)
        for column in (self._first, self._x, self._sum, self._count, self._low, self._high):
            del column[kept:]
        if kept:
            self._x[-1] = min(self._x[-1], x)
            self.last = self._sum[-1] / self._count[-1]

    def to_dict(self) -> dict[str, Any]:
        """Return the columns of a chart: steps, means, and if intervals have several points also lows and highs."""
        mean = [total / count for total, count in zip(self._sum, self._count, strict=True)]
        columns: dict[str, Any] = {"x": list(self._x), "mean": mean}
        if self.stride > 1:
            columns |= {"low": list(self._low), "high": list(self._high)}
        return columns

    def outline(self, most: int) -> list[float]:
        """Return at most `most` means that are spread over the curve, including the last one, with five digits.

        >>> series = Series()
        >>> series.extend(range(10), [float(step) for step in range(10)])
        >>> series.outline(3)
        [2.0, 5.0, 9.0]
        """
        num = len(self)
        places = [(place + 1) * num // most - 1 for place in range(most)] if num > most else range(num)
        return [float(f"{self._sum[place] / self._count[place]:.5g}") for place in places]

    def __len__(self) -> int:
        return len(self._x)

    def _join(self) -> None:
        """Merge neighbouring intervals in pairs; a last interval without a neighbour gets further points."""
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
