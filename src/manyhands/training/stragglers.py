"""Stragglers: replicas that need longer for their own work than the others, so that all wait for them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from ..core import Event, event

WINDOW_STEPS = 20
WINDOW_SECONDS = 0.5
"""A window has at least so many steps, and lasts so long."""
SLOW = 0.75
"""A replica is slow that has less than this part of the median speed, ..."""
NUM_WINDOWS = 3
"""... in so many windows one after another."""


class Stopwatch:
    """What a replica's own work takes: the time of its steps, less what it waited for others.

    A window counts by its median, so that what comes now and then, a checkpoint say, makes nobody slow.
    """

    def __init__(self) -> None:
        self._began = self._at = time.perf_counter()
        self._waited = 0.0
        self._busy: list[float] = []

    def step(self, waited: float) -> float | None:
        """Takes note of a step; `waited` is how long this replica has waited so far. The median where a window ends."""
        now = time.perf_counter()
        self._busy.append(max(0.0, now - self._at - (waited - self._waited)))
        self._at, self._waited = now, waited
        if len(self._busy) < WINDOW_STEPS or now - self._began < WINDOW_SECONDS:
            return None
        median, self._busy, self._began = statistics.median(self._busy), [], now
        return median


@dataclass
class _Replica:
    host: str = ""
    seconds: float = 0.0
    num_slow: int = 0
    is_flagged: bool = False


@dataclass
class Stragglers:
    """Hears the windows of all replicas, and says which of them is slow.

    >>> stragglers = Stragglers(size=3)
    >>> for window in range(3):
    ...     for rank, seconds in enumerate((0.1, 0.1, 0.2)):
    ...         for told in stragglers.hear(event("pace", rank=rank, host="host1", step=20 * window, seconds=seconds)):
    ...             print(told["text"])
    rank 2 on host1 is slow: its work takes 200 ms a step, that of the others 100 ms, and all wait for it
    """

    size: int
    _replicas: dict[int, _Replica] = field(default_factory=dict)

    def hear(self, entry: Event) -> list[Event]:
        """What to tell after an event."""
        if entry["kind"] == "recovered":
            # Ranks may have other numbers now.
            self._replicas, self.size = {}, entry["size"]
        if entry["kind"] != "pace":
            return []
        is_first = entry["rank"] not in self._replicas
        replica = self._replicas.setdefault(entry["rank"], _Replica())
        replica.host, replica.seconds = entry["host"], entry["seconds"]
        if len(self._replicas) < self.size:
            return []
        # Whoever completes the first round is compared with the others, and they with it.
        ranks = list(self._replicas) if is_first else [entry["rank"]]
        return [told for rank in ranks for told in self._judge(rank, entry["step"])]

    def _judge(self, rank: int, step: int) -> list[Event]:
        replica = self._replicas[rank]
        median = statistics.median(other.seconds for other in self._replicas.values())
        is_slow = replica.seconds > 0 and median < SLOW * replica.seconds
        replica.num_slow = replica.num_slow + 1 if is_slow else 0
        told = {"rank": rank, "host": replica.host, "step": step, "seconds": replica.seconds}
        if replica.num_slow >= NUM_WINDOWS and not replica.is_flagged:
            replica.is_flagged = True
            others = statistics.median(r.seconds for number, r in self._replicas.items() if number != rank)
            text = (
                f"rank {rank} on {replica.host} is slow: its work takes {1e3 * replica.seconds:.3g} ms a step, "
                f"that of the others {1e3 * others:.3g} ms, and all wait for it"
            )
            return [event("straggler", text=text, **told)]
        if replica.num_slow == 0 and replica.is_flagged:
            replica.is_flagged = False
            return [event("straggler", text=f"rank {rank} on {replica.host} is as fast as the others again", **told)]
        return []
