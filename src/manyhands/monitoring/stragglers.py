"""Detection of stragglers: replicas that compute more slowly than the others, so that all wait for them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

from ..core import Event, event, format_duration

WINDOW_STEPS = 20
WINDOW_SECONDS = 0.5
"""Minimum number of steps of a window, and its minimum duration in seconds."""
SLOW = 0.75
"""A replica is slow in a window if its speed is below this share of the median speed of all replicas."""
NUM_WINDOWS = 3
"""Number of consecutive slow windows after which a replica is reported."""


class Stopwatch:
    """Measure a replica's own work: the time of its steps without the time that it waits for other replicas.

    The median of a window is reported, so that occasional work such as a checkpoint does not make a replica slow.
    """

    def __init__(self) -> None:
        self._began = self._at = time.perf_counter()
        self._waited = 0.0
        self._busy: list[float] = []

    def step(self, waited: float) -> float | None:
        """Record the end of a step, and return the median seconds of own work if a window ends here, else None.

        Args:
            waited: Seconds that the replica has waited for others since the start of training.
        """
        now = time.perf_counter()
        self._busy.append(max(0.0, now - self._at - (waited - self._waited)))
        self._at, self._waited = now, waited
        if len(self._busy) < WINDOW_STEPS or now - self._began < WINDOW_SECONDS:
            return None
        median, self._busy, self._began = statistics.median(self._busy), [], now
        return median


@dataclass
class _ReplicaWindow:
    """The latest window of a replica, and the number of its consecutive slow windows."""

    host: str = ""
    seconds: float = 0.0
    num_slow: int = 0
    is_flagged: bool = False


@dataclass
class Stragglers:
    """Compare the "pace" events of all replicas, one per window, and report slow replicas.

    >>> stragglers = Stragglers(size=3)
    >>> for window in range(3):
    ...     for rank, seconds in enumerate((0.1, 0.1, 0.2)):
    ...         pace = event("pace", rank=rank, host="host1", step=20 * window, seconds=seconds)
    ...         for entry in stragglers.handle_event(pace):
    ...             print(entry["text"])
    rank 2 on host1 is slow: its work takes 200 ms a step, that of the others 100 ms, and all wait for it
    """

    size: int
    _replicas: dict[int, _ReplicaWindow] = field(default_factory=dict)

    def handle_event(self, entry: Event) -> list[Event]:
        """Handle an event of the run, and return events that report stragglers or their recovery."""
        if entry["kind"] == "recovered":
            # After a recovery, ranks may have other numbers.
            self._replicas, self.size = {}, entry["size"]
        if entry["kind"] != "pace":
            return []
        is_first = entry["rank"] not in self._replicas
        replica = self._replicas.setdefault(entry["rank"], _ReplicaWindow())
        replica.host, replica.seconds = entry["host"], entry["seconds"]
        if len(self._replicas) < self.size:
            return []
        # The report that completes the first round lets all replicas be compared; later ones, only their sender.
        ranks = list(self._replicas) if is_first else [entry["rank"]]
        return [report for rank in ranks for report in self._judge(rank, entry["step"])]

    def _judge(self, rank: int, step: int) -> list[Event]:
        replica = self._replicas[rank]
        median = statistics.median(other.seconds for other in self._replicas.values())
        is_slow = replica.seconds > 0 and median < SLOW * replica.seconds
        replica.num_slow = replica.num_slow + 1 if is_slow else 0
        report = {"rank": rank, "host": replica.host, "step": step, "seconds": replica.seconds}
        if replica.num_slow >= NUM_WINDOWS and not replica.is_flagged:
            replica.is_flagged = True
            others = statistics.median(r.seconds for number, r in self._replicas.items() if number != rank)
            text = (
                f"rank {rank} on {replica.host} is slow: its work takes {format_duration(replica.seconds)} a step, "
                f"that of the others {format_duration(others)}, and all wait for it"
            )
            return [event("straggler", text=text, **report)]
        if replica.num_slow == 0 and replica.is_flagged:
            replica.is_flagged = False
            return [event("straggler", text=f"rank {rank} on {replica.host} is as fast as the others again", **report)]
        return []
