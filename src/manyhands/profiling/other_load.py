"""CPU time that programs other than the ranks use while steps are timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from ..distributed import World, message

MIN_SECONDS = 0.3
"""Shorter times are not judged: the kernel counts in hundredths of a second."""
REPORTED = 0.15
"""Fraction of the cores from which other programs are reported."""
IDLE = ("idle", "iowait", "guest", "guest_nice")
"""Times that are not work, or that the kernel counts twice."""


@message
@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """CPU seconds within a time span."""

    host: str
    cores: tuple[int, ...]
    """The cores that the rank may use."""
    seconds: float
    """Length of the time span."""
    busy: float
    """CPU seconds of all programs on these cores."""
    own: float
    """CPU seconds of the rank and of its worker processes, on any core."""


class OtherLoad:
    """Measures the CPU time of other programs from its creation on."""

    def __init__(self, host: str) -> None:
        self._host, self._cores = host, tuple(sorted(os.sched_getaffinity(0)))
        self._began, self._busy, self._own = time.perf_counter(), _busy(self._cores), _own()

    def end(self, world: World) -> float | None:
        """Return the fraction of the cores that other programs used; collective. None for a time that is too short."""
        seconds = time.perf_counter() - self._began
        used = CpuTime(
            host=self._host,
            cores=self._cores,
            seconds=seconds,
            busy=_busy(self._cores) - self._busy,
            own=_own() - self._own,
        )
        return others_share(used, world.gather_objects(used))


def others_share(mine: CpuTime, every: Iterable[CpuTime]) -> float | None:
    """Return the fraction of a rank's cores that was used by none of the ranks.

    >>> first, second = (CpuTime(host="a", cores=(0, 1), seconds=1.0, busy=1.5, own=0.5) for _ in range(2))
    >>> others_share(first, [first, second])
    0.25
    """
    if mine.seconds < MIN_SECONDS:
        return None
    own = sum(one.own for one in every if (one.host, one.cores) == (mine.host, mine.cores))
    return min(1.0, max(0.0, mine.busy - own) / (mine.seconds * len(mine.cores)))


def load_notes(shares: Iterable[tuple[str, float | None]]) -> list[str]:
    """Return a note for the host on which other programs used most, if that was much.

    >>> load_notes([("a", 0.5), ("b", None)])[0].partition(":")[0]
    'other programs used 50% of the CPU cores of a while steps were timed'
    """
    share, host = max(((share, host) for host, share in shares if share is not None), default=(0.0, ""))
    if share < REPORTED:
        return []
    return [
        f"other programs used {share:.0%} of the CPU cores of {host} while steps were timed: times are longer than on "
        "an idle machine; end those programs and profile again"
    ]


def _busy(cores: tuple[int, ...]) -> float:
    """Return the CPU seconds since the start of the machine that these cores have worked."""
    every = psutil.cpu_times(percpu=True)
    spent = sum(
        seconds
        for core in cores
        if core < len(every)
        for name, seconds in every[core]._asdict().items()
        if name not in IDLE
    )
    return float(spent)


def _own() -> float:
    """Return the CPU seconds of this process and of its children."""
    me = psutil.Process()
    spent = sum(me.cpu_times()[:4])  # user and system, also of children that have ended
    for child in me.children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:4])
        except psutil.Error:
            continue
    return float(spent)
