"""How long batches take: what a queue's wait is reckoned from."""

from __future__ import annotations

from collections import deque

_LAST = 16
"""Batches that count: what happened before them, a burst or a stall, says nothing about the next one."""


class BatchTimeModel:
    """So much for any batch and so much for each row, a line through the last ones.

    Rows a second would not do: after requests that came one by one, it would take a full batch for as many of these.

    >>> pace = Pace()
    >>> pace.learn(1, 0.005)
    >>> pace.seconds(64)
    0.005
    >>> pace.learn(41, 0.009)
    >>> round(pace.seconds(21), 6)
    0.007
    """

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque()
        self._rows = self._squares = 0
        self._seconds = self._products = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long."""
        self._last.append((rows, seconds))
        self._count(rows, seconds, 1)
        if len(self._last) > _LAST:
            self._count(*self._last.popleft(), -1)

    def seconds(self, rows: int) -> float:
        """For a batch of so many; 0 where nothing is known.

        More rows take no less time, and no more than in proportion, whatever few and noisy batches say.
        """
        num = len(self._last)
        if not num:
            return 0.0
        mean, mean_rows = self._seconds / num, self._rows / num
        spread = num * self._squares - self._rows**2
        slope = (num * self._products - self._rows * self._seconds) / spread if spread else 0.0
        least, most = sorted((mean, mean * rows / mean_rows))
        return min(max(mean + slope * (rows - mean_rows), least), most)

    def _count(self, rows: int, seconds: float, sign: int) -> None:
        self._rows += sign * rows
        self._squares += sign * rows * rows
        self._seconds += sign * seconds
        self._products += sign * rows * seconds
