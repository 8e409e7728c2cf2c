"""Sampling: profile every n-th step of a run by phase, on every rank, and report it as an event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ..core import Event, event
from ..data import Feed
from ..distributed import World, message
from ..monitoring import IDLE, PHASES, Span, Spans, by_phase
from .hand import Hand

EVERY = 50
"""Default number of steps between samples."""


@message
@dataclass(frozen=True)
class Sample:
    """The profile of one step on one rank: seconds by phase, and the spans they are summed from."""

    step: int
    seconds: Mapping[str, float]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def total(self) -> float:
        """Seconds of the step, from the end of the previous one."""
        return sum(self.seconds.values())


class StepTimer:
    """Times one step, from construction (the end of the previous step) to `close`."""

    def __init__(self, hand: Hand, feed: Feed) -> None:
        self._hand, self._pace = hand, feed.pace
        self._before = feed.pace.input, feed.pace.copy
        self._spans = Spans(hand.device)
        hand.times.spans = hand.world.collective_log.spans = self._spans

    def close(self) -> Sample:
        """Return the profile of the step taken since construction."""
        hand = self._hand
        hand.times.spans = hand.world.collective_log.spans = None
        waited, copied = self._pace.input - self._before[0], self._pace.copy - self._before[1]
        spans = _with_input(self._spans.end(), waited, copied)
        seconds = dict.fromkeys(PHASES, 0.0) | by_phase(spans)
        return Sample(hand.num_steps, seconds, tuple(spans))

    def drop(self) -> None:
        """Discard the measurement, because something other than a step ran."""
        self._hand.times.spans = self._hand.world.collective_log.spans = None


def _with_input(spans: list[Span], waited: float, copied: float) -> list[Span]:
    """Split the first span into the wait for the batch, its copy, and idle time, which are not marked separately."""
    first = spans[0]
    read = min(first.end, first.start + waited)
    moved = min(first.end, read + copied)
    found = [Span("input", first.start, read), Span("copy", read, moved), Span(IDLE, moved, first.end)]
    return [*(span for span in found if span.end > span.start), *spans[1:]]


class Sampler:
    """Times one step in every `every`, and reports it."""

    def __init__(self, hand: Hand, feed: Feed, every: int) -> None:
        self._hand, self._feed, self._every = hand, feed, every
        self._window: StepTimer | None = None

    def step(self) -> None:
        """Account for a step: report a finished sample, and start the next one where due."""
        if self._window is not None:
            sample, self._window = self._window.close(), None
            self._hand.world.channel.report(profile_event(self._hand.world, sample))
        if self._hand.num_steps % self._every == self._every - 1:
            self._window = StepTimer(self._hand, self._feed)

    def pause(self) -> None:
        """Discard an open sample, because something other than a step follows."""
        if self._window is not None:
            self._window.drop()
            self._window = None


def profile_event(world: World, sample: Sample) -> Event:
    """Return a sample as an event, with the peak of the device's memory."""
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
    seconds = {name: round(value, 9) for name, value in sample.seconds.items()}
    about = {"rank": world.rank, "host": world.rank_info.host, "step": sample.step, "peak": peak}
    return event("profile", seconds=seconds, total=round(sample.total, 9), **about)


@message
@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Time of one rank's typical step by phase: medians over some steps."""

    rank: int
    host: str
    seconds: Mapping[str, float]
    total: float
    """The median step time; the phases' medians need not add up to it exactly."""
    steps: tuple[int, ...]
    """The sampled steps."""
    peak: int = 0
    """Peak bytes of device memory, on a GPU."""

    @property
    def work(self) -> float:
        """Seconds of the rank's own work, without communication."""
        return max(0.0, self.total - self.seconds.get("communication", 0.0))

    @classmethod
    def of(cls, rank: int, host: str, samples: Iterable[Mapping[str, Any]]) -> Breakdown:
        """Create a breakdown from a rank's samples: dicts with step, seconds and total.

        >>> steps = [{"step": n, "seconds": {"forward": n}, "total": n} for n in (1.0, 2.0, 9.0)]
        >>> Breakdown.of(0, "host1", steps).total
        2.0
        """
        taken = list(samples)
        names = dict.fromkeys([*PHASES, *(name for one in taken for name in one["seconds"])])
        return cls(
            rank=rank,
            host=host,
            seconds={name: median(one["seconds"].get(name, 0.0) for one in taken) for name in names},
            total=median(one["total"] for one in taken),
            steps=tuple(one["step"] for one in taken),
            peak=max(one.get("peak", 0) for one in taken),
        )


def breakdowns(events: Iterable[Event]) -> tuple[Breakdown, ...]:
    """Return breakdowns by rank from a run's events, for the ranks that the run ended with."""
    found: dict[int, list[Event]] = {}
    for entry in events:
        if entry["kind"] == "profile":
            found.setdefault(entry["rank"], []).append(entry)
        elif entry["kind"] == "recovered":
            found = {rank: taken for rank, taken in found.items() if rank < entry["size"]}
    return tuple(Breakdown.of(rank, found[rank][-1]["host"], found[rank]) for rank in sorted(found))
