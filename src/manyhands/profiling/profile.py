"""Profile: how a task's steps spend time and memory on every rank, with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..core import event, format_duration, html_lines, html_table, keep_event
from ..training import Breakdown
from .advice import Advice, advise
from .probe import RankProfile

SLOW = 0.75
"""Ratio of the other ranks' median work time to a rank's own, below which the rank counts as a straggler."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Time of a step by rank, phase, module and operation, its memory over time, and advice.

    `profile.show()` prints it, `profile.save("profile.html")` writes a page with the timeline, and
    `profile.trace("trace.json")` writes a trace that Perfetto opens.
    """

    name: str
    strategy: str
    batch_size: int
    ranks: tuple[RankProfile, ...]
    flops: float | None = None
    """FLOPs of a step, forward and backward, on all ranks; None if the network could not be traced."""
    epoch_steps: int | None = None
    """Number of steps of an epoch; None if it is not known."""
    valid_steps: int = 0
    """Number of batches that are validated after an epoch."""
    upkeep: Mapping[str, float] = field(default_factory=dict)
    """Fractions of a run's time that checkpoints ("save") and validation took; empty if this is not a run's profile."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """The StrategySpec as a dict."""
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of a step on the slowest rank."""
        return max(one.breakdown.total for one in self.ranks)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a step by phase, averaged over the ranks."""
        names = dict.fromkeys(name for one in self.ranks for name in one.parts.seconds)
        return {name: fmean(one.parts.seconds.get(name, 0.0) for one in self.ranks) for name in names}

    def share(self, phase: str) -> float:
        """Return the fraction of a step's time spent in a phase."""
        whole = sum(self.phases.values())
        return self.phases.get(phase, 0.0) / whole if whole else 0.0

    @property
    def samples_per_second(self) -> float:
        """Number of samples that all ranks together train per second."""
        return self.batch_size / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: FLOPs per second relative to the devices' measured rate in large matrix products."""
        ceilings = [one.ceiling for one in self.ranks if one.ceiling]
        if self.flops is None or len(ceilings) < len(self.ranks):
            return None
        return self.flops / self.seconds / sum(ceilings)

    @property
    def stragglers(self) -> list[Breakdown]:
        """Breakdowns of the ranks whose work takes much longer than that of the others, which wait for them."""
        works = [one.breakdown for one in self.ranks]
        if len(works) < 2 or self.spec.get("stages", 1) > 1:
            return []
        slow = []
        for one in works:
            others = median(other.work for other in works if other is not one)
            if others < SLOW * one.work:
                slow.append(one)
        return slow

    @property
    def transfer(self) -> float:
        """Seconds of a step in pure communication: the minimum over the ranks, which excludes waits for slow ranks."""
        return min(one.breakdown.seconds.get("communication", 0.0) for one in self.ranks)

    @cached_property
    def advice(self) -> list[Advice]:
        """Advice for this profile, ordered by expected gain, the largest first."""
        return advise(self)

    def show(self) -> None:
        """Print the profile as tables."""
        from .report import show

        show(self)

    def save(self, path: str | Path) -> Path:
        """Write the profile and its timeline as one self-contained HTML file, and return its path."""
        from .html_report import html

        Path(path).write_text(html(self), encoding="utf-8")
        return Path(path)

    def trace(self, path: str | Path) -> Path:
        """Write the timeline as a trace for Perfetto and Chrome, and return its path."""
        from .perfetto import write

        return write(self, Path(path))

    def log(self, folder: str | Path) -> None:
        """Append the profile to the event log of a folder, for the dashboard."""
        keep_event(folder, event("profiled", **self.to_dict()))

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the timeline as JSON-ready data."""
        return {
            "task": self.name,
            "strategy": self.strategy,
            "batch_size": self.batch_size,
            "seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
            "phases": self.phases,
            "mfu": self.mfu,
            "flops": self.flops,
            "ranks": [_rank(one) for one in self.ranks],
            "stragglers": [{"rank": one.rank, "host": one.host, "seconds": one.work} for one in self.stragglers],
            "advice": [asdict(one) for one in self.advice],
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        from .report import closing, headline

        spent = {name: seconds for name, seconds in self.phases.items() if seconds}
        rows = [(name, format_duration(seconds), f"{self.share(name):.0%}") for name, seconds in spent.items()]
        return html_table(headline(self), rows, ("part of a step", "time", "share")) + html_lines(closing(self))


def _rank(one: RankProfile) -> dict[str, Any]:
    watched, memory = one.watched, one.memory
    return {
        "rank": one.rank,
        "host": one.breakdown.host,
        "device": one.device,
        "seconds": one.breakdown.total,
        "phases": dict(one.parts.seconds),
        "ceiling": one.ceiling,
        "busy": None if watched is None else watched.busy,
        "operations": [] if watched is None else [asdict(op) for op in watched.operations[:30]],
        "modules": [] if watched is None else [asdict(module) for module in watched.modules],
        "memory": None if memory is None else {**memory.peak, "when": memory.peak_phase},
        "sent": one.sent,
        "reading": [asdict(line) for line in one.reading],
        "other_load": one.other_load,
    }


def of_run(
    name: str, strategy: str, spec: Mapping[str, Any], batch_size: int, taken: Sequence[Breakdown], **more: Any
) -> Profile:
    """Return the profile of a run from the breakdown of each rank's sampled steps; `more` are fields of Profile."""
    ranks = tuple(RankProfile(breakdown=one) for one in taken)
    return Profile(name=name, strategy=strategy, spec=spec, batch_size=batch_size, ranks=ranks, **more)
