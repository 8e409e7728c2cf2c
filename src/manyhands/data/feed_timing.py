"""Where a feed's time goes, what limits it, and how many workers pay for themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

FELT = 0.1
"""A share of the time from which waiting is worth a word."""
SATURATED = 0.8
"""A share of the time in which the copying engine is busy, from which it is the limit."""
STRETCH_BATCHES = 20
STRETCH_SECONDS = 0.5
WORTH_A_TRIAL = 0.03
"""A share of the time from which waiting is worth a try of more workers."""
GAIN = 0.99
"""A number of workers must take at most this share of the time of the one before to be kept."""

REST = 5
"""Stretches to rest after the first trial that failed; as many times as many after every other one."""


@dataclass
class FeedTiming:
    """Seconds by what they were spent on, seen from the consumer of a feed."""

    input: float = 0.0
    """Waiting for data to be read."""
    copy: float = 0.0
    """Waiting for data to be copied or cast."""
    compute: float = 0.0
    """Between two batches, and while an accelerator was still busy."""
    copying: float = 0.0
    """Seconds in which the accelerator's copying engine was busy, which nobody need have waited for."""

    @property
    def total(self) -> float:
        """All of the consumer's time."""
        return self.input + self.copy + self.compute

    @property
    def limit(self) -> str:
        """What limits the speed: "input", "copy" or "compute".

        >>> Pace(input=3.0, compute=7.0).limit, Pace(input=0.1, compute=9.0).limit, Pace(copy=2.0, compute=7.0).limit
        ('input', 'compute', 'copy')
        """
        if self.total and self.copying > SATURATED * self.total:
            return "copy"
        if self.input + self.copy <= FELT * self.total:
            return "compute"
        return "copy" if self.copy > self.input else "input"

    def said(self, workers: int) -> str:
        """A sentence for a person where data is the limit; empty where it is not.

        >>> Pace(input=3.0, compute=7.0).said(workers=2)
        'input is the limit: 30% of the time went into waiting for data, which 2 worker processes read'
        """
        readers = "this process reads" if not workers else f"{workers} worker process{'es' * (workers > 1)} read"
        share = (self.input + self.copy) / self.total if self.total else 0.0
        texts = {
            "input": f"input is the limit: {share:.0%} of the time went into waiting for data, which {readers}",
            "copy": "copying to the device is the limit: smaller types (uint8, bf16) would be quicker",
        }
        return texts.get(self.limit, "")


@dataclass
class Adaptation:
    """Finds the number of workers: tries more while input is the limit, and keeps them only if batches come faster.

    Fed with the seconds of every batch, it now and then returns another number: as many as would read a batch in the
    time in which one is computed. It never stays with a number that was not measured to be better than the one before;
    since another program may have disturbed the trial, it tries again after a while, each time a longer one.

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
    """Whether the number is not ours to choose."""
    _before: tuple[int, float] | None = None
    """The number before the one on trial, and its seconds per batch."""
    _skip: int = 1
    """Batches that say nothing: what a new set of readers gives first."""
    _rest: int = 0
    """Stretches until the next trial."""
    _num_failed: int = 0
    _seconds: list[float] = field(default_factory=list)
    _waited: float = 0.0

    def after(self, *, waited: float, computed: float, workers: int) -> int | None:
        """Another number of workers to go on with; None: the same."""
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
        """Workers that would read as fast as the consumer computes."""
        # Alone, this process reads while the consumer waits; workers read all the time.
        reading = workers if workers else share
        wanted = reading / (1 - share) if share < 1 else self.most
        return min(self.most, max(workers + 1, math.ceil(wanted - FELT)))


def _typical(seconds: list[float]) -> float:
    """The mean without the slowest tenth: a checkpoint or a validation in between is none of the readers' doing."""
    kept = sorted(seconds)[: -max(1, len(seconds) // 10)]
    return sum(kept) / len(kept)
