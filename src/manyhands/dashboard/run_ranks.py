"""The ranks of a run: host and device, time by activity, memory, and whether a rank is slow."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Any

from .series import Series

MOST_RANKS = 4096
"""Maximum number of ranks that are kept per run."""
NUM_SAMPLES = 64
"""Number of latest profiled steps per rank, whose median is shown."""


class Rank:
    """State of a rank, as its latest events report it."""

    def __init__(self) -> None:
        self.host = self.device = self.limit = ""
        self.seconds: dict[str, float] = {}
        """Seconds that the rank has spent so far, by activity."""
        self.memory, self.pace = Series(), Series()
        self.held: dict[str, int] = {}
        self.samples: deque[dict[str, float]] = deque(maxlen=NUM_SAMPLES)
        self.peak = 0
        self.is_slow = False

    def phases(self) -> dict[str, float]:
        """Return the median seconds of each phase of a step; empty if no steps were profiled."""
        names = dict.fromkeys(name for sample in self.samples for name in sample)
        return {name: median(sample.get(name, 0.0) for sample in self.samples) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "device": self.device,
            "limit": self.limit,
            "seconds": self.seconds,
            "phases": self.phases(),
            "pace": self.pace.last if len(self.pace) else None,
            "memory": self.memory.last if len(self.memory) else None,
            "peak": self.peak,
            "held": self.held,
            "slow": self.is_slow,
        }


class RunRanks:
    """The ranks of a run by number, with their state from the events that they report."""

    def __init__(self) -> None:
        self.by_number: dict[int, Rank] = {}

    def _of(self, entry: dict[str, Any]) -> Rank:
        """Return the rank that an event names; raise ValueError if the run has too many ranks."""
        number = entry["rank"]
        rank = self.by_number.get(number)
        if rank is None:
            if number >= MOST_RANKS:
                raise ValueError("the run has too many ranks")
            rank = self.by_number[number] = Rank()
        rank.host, rank.device = entry.get("host") or rank.host, entry.get("device") or rank.device
        return rank

    def on_waits(self, entry: dict[str, Any]) -> None:
        rank = self._of(entry)
        rank.seconds, rank.limit = entry["seconds"], entry.get("limit") or ""
        rank.memory.add(entry["t"], entry.get("memory"))

    def on_pace(self, entry: dict[str, Any]) -> None:
        self._of(entry).pace.add(entry["step"], entry["seconds"])

    def on_points(self, entry: dict[str, Any]) -> None:
        """Add the points of an older part of the log, which were merged when it was compacted."""
        rank, columns = self._of(entry), ("first", "x", "total", "count", "low", "high")
        series = {"memory": rank.memory, "pace": rank.pace}[entry["curve"]]
        series.merge(zip(*(entry[name] for name in columns), strict=True), entry["last"])

    def on_profile(self, entry: dict[str, Any]) -> None:
        rank = self._of(entry)
        rank.samples.append(entry["seconds"])
        rank.peak = max(rank.peak, entry["peak"])

    def on_used(self, entry: dict[str, Any]) -> None:
        rank = self._of(entry)
        rank.held = {name: entry[name] for name in ("parameters", "optimizer")}
        rank.peak = max(rank.peak, entry["peak"])

    def on_straggler(self, entry: dict[str, Any]) -> None:
        self._of(entry).is_slow = "is slow" in entry["text"]

    def on_recovered(self, entry: dict[str, Any]) -> None:
        size = entry["size"]
        self.by_number = {number: rank for number, rank in self.by_number.items() if number < size}

    def step_seconds(self, num_steps: int) -> float | None:
        """Return the seconds of a step of rank 0; None if they are not known.

        This is the median of its profiled steps, or else the mean over `num_steps` steps without validation and
        checkpoints.
        """
        rank = self.by_number.get(0, Rank())
        if rank.samples:
            return median(sum(sample.values()) for sample in rank.samples)
        busy = rank.seconds.get("total", 0.0) - rank.seconds.get("save", 0.0) - rank.seconds.get("validation", 0.0)
        return busy / num_steps if busy > 0 and num_steps > 0 else None

    def placed(self, devices: list[Any]) -> list[dict[str, Any]]:
        """Return host, device and memory of every rank for the cluster page, given the devices in the run's record."""
        found = []
        # Device names contain the host only if there are several; a rank may have reported it.
        known = next((rank.host for rank in self.by_number.values() if rank.host), "this host")
        for number in sorted({*self.by_number, *range(len(devices))}):
            rank = self.by_number.get(number, Rank())
            named = str(devices[number]) if number < len(devices) else rank.device
            host, _, device = named.rpartition("/")
            memory = rank.memory.last if len(rank.memory) else None
            place = {"host": host or rank.host or known, "device": device or rank.device}
            found.append({**place, "rank": number, "memory": memory, "slow": rank.is_slow})
        return found

    def series(self) -> dict[str, dict[str, Series]]:
        """Return the curves of all ranks by group ("pace" or "memory") and rank."""
        ranks = sorted(self.by_number.items())
        return {
            "pace": {f"rank {number}": rank.pace for number, rank in ranks if len(rank.pace)},
            "memory": {f"rank {number}": rank.memory for number, rank in ranks if len(rank.memory)},
        }
