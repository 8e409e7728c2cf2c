"""Adaptation: the choice of the number of worker processes that read a feed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SPARE = 0.1
"""The fraction of a worker's time by which reading may be slower than computing."""
STRETCH_BATCHES = 20
STRETCH_SECONDS = 0.5
WORTH_A_TRIAL = 0.03
"""More workers are tried if waiting takes more than this fraction of the time."""
GAIN = 0.99
"""A new number of workers is kept if batches take at most this fraction of the time that they took before."""
REST = 5
"""Measuring periods to pause after the first failed trial; each further failed trial multiplies the pause by REST."""


@dataclass
class Adaptation:
    """Find the number of workers: try more while input is the bottleneck, and keep them only if batches come faster.

    `after` gets the seconds of every batch and sometimes returns another number of workers: as many as should read a
    batch in the time in which one is computed. It is kept only if batches then take less time. Because another program
    may have disturbed a failed trial, the trial is repeated after a pause, which grows each time.

    >>> adaptation = Adaptation(most=4)
    >>> [n for _ in range(30) if (n := adaptation.after(waited=0.03, computed=0.01, workers=0)) is not None]
    [3]
    >>> [n for _ in range(30) if (n := adaptation.after(waited=0.04, computed=0.01, workers=3)) is not None]
    [0]
    >>> [n for _ in range(40) if (n := adaptation.after(waited=0.03, computed=0.01, workers=0)) is not None]
    []
    """

    most: int
    settled: bool = False
    """Whether the number of workers is fixed."""
    _before: tuple[int, float] | None = None
    """During a trial, the previous number of workers and its seconds per batch; else None."""
    _skip: int = 1
    """Number of batches to ignore: the first ones of new readers."""
    _rest: int = 0
    """Measuring periods until the next trial."""
    _num_failed: int = 0
    _seconds: list[float] = field(default_factory=list)
    _waited: float = 0.0

    def after(self, *, waited: float, computed: float, workers: int) -> int | None:
        """Return another number of workers to continue with; None to keep the current one.

        Args:
            waited: Seconds of waiting for the last batch.
            computed: Seconds of computing on it.
            workers: The current number of workers.
        """
        if self.settled:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._seconds.append(waited + computed)
        self._waited += waited
        if len(self._seconds) < STRETCH_BATCHES or sum(self._seconds) < STRETCH_SECONDS:
            return None
        return self._decided(workers)

    def _decided(self, workers: int) -> int | None:
        seconds, share = _typical(self._seconds), self._waited / sum(self._seconds)
        more = self._enough(workers, share)
        self._seconds, self._waited = [], 0.0
        before, self._before = self._before, None
        if before is not None and seconds > GAIN * before[1]:
            self._num_failed += 1
            self._rest, self._skip = REST**self._num_failed, 1
            return before[0]
        self._rest = max(0, self._rest - 1)
        if share <= WORTH_A_TRIAL or more <= workers or self._rest:
            return None
        self._before, self._skip = (workers, seconds), 2 * more + 1
        return more

    def _enough(self, workers: int, share: float) -> int:
        """Return the number of workers that should read as fast as the consumer computes.

        `share` is the fraction of the time for which the consumer waited with `workers` workers.
        """
        # Without workers this process reads only while the consumer waits; workers read all the time.
        reading = workers if workers else share
        wanted = reading / (1 - share) if share < 1 else self.most
        return min(self.most, max(workers + 1, math.ceil(wanted - SPARE)))


def _typical(seconds: list[float]) -> float:
    """Return the mean of durations without the slowest tenth, which may include a checkpoint or a validation."""
    kept = sorted(seconds)[: -max(1, len(seconds) // 10)]
    return sum(kept) / len(kept)
