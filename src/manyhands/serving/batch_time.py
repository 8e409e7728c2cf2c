"""How long batches take, learned from the last ones: for load shedding, hung batches, and sizes of batches."""

from __future__ import annotations

from collections import deque

_LAST = 16
"""Number of latest batches that count; earlier ones, such as a burst or a stall, predict nothing."""


class BatchTimeModel:
    """Linear model of the last batches: a constant per batch plus a time per row.

    Rows per second would not do: after single-row requests, a full batch would be estimated as that many requests.

    >>> pace = BatchTimeModel()
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

    @property
    def most_rows(self) -> int:
        """Rows of the largest of the last batches; 0 if nothing is known."""
        return max((rows for rows, _ in self._last), default=0)

    def learn(self, rows: int, seconds: float) -> None:
        """Record the duration of a batch."""
        self._last.append((rows, seconds))
        self._count(rows, seconds, 1)
        if len(self._last) > _LAST:
            self._count(*self._last.popleft(), -1)

    def seconds(self, rows: int) -> float:
        """Return the estimated duration of a batch; 0 if nothing is known.

        The estimate never decreases with rows and grows at most proportionally, even if the few samples are noisy.
        """
        num = len(self._last)
        if not num:
            return 0.0
        mean, mean_rows = self._seconds / num, self._rows / num
        spread = num * self._squares - self._rows**2
        slope = (num * self._products - self._rows * self._seconds) / spread if spread else 0.0
        least, most = sorted((mean, mean * rows / mean_rows))
        return min(max(mean + slope * (rows - mean_rows), least), most)

    def rows_within(self, seconds: float) -> int:
        """Return the rows that a batch surely computes in this time, if time grows at most with the rows.

        >>> pace = BatchTimeModel()
        >>> pace.learn(4, 0.001)
        >>> pace.rows_within(0.05)
        200
        """
        return int(seconds * self._rows / self._seconds) if self._seconds else 0

    def _count(self, rows: int, seconds: float, sign: int) -> None:
        self._rows += sign * rows
        self._squares += sign * rows * rows
        self._seconds += sign * seconds
        self._products += sign * rows * seconds
