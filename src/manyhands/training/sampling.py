"""Sampling: one step in fifty of a run is timed by what it does, on every rank, and told as an event."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from ..core import Event, event
from ..data import Feed
from ..distributed import World, message
from .hand import Hand
from .spans import IDLE, PHASES, Span, Spans, by_phase

EVERY = 50
"""Steps from one sample to the next."""


@message
@dataclass(frozen=True)
class Sample:
    """One step of one rank: seconds by phase, and the spans they are the sums of."""

    step: int
    seconds: Mapping[str, float]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def total(self) -> float:
        """All of the step, from the end of the one before."""
        return sum(self.seconds.values())


class StepTimer:
    """Times one step: opened when the one before has ended, closed when it has."""

    def __init__(self, hand: Hand, feed: Feed) -> None:
        self._hand, self._pace = hand, feed.pace
        self._before = feed.pace.input, feed.pace.copy
        self._spans = Spans(hand.device)
        hand.spans = hand.world.diary.spans = self._spans

    def close(self) -> Sample:
        """The step that was taken since."""
        hand = self._hand
        hand.spans = hand.world.diary.spans = None
        waited, copied = self._pace.input - self._before[0], self._pace.copy - self._before[1]
        spans = _with_input(self._spans.end(), waited, copied)
        seconds = dict.fromkeys(PHASES, 0.0) | by_phase(spans)
        return Sample(hand.num_steps, seconds, tuple(spans))

    def drop(self) -> None:
        """Forgets it: something else came between."""
        self._hand.spans = self._hand.world.diary.spans = None


def _with_input(spans: list[Span], waited: float, copied: float) -> list[Span]:
    """What comes first in a step is the wait for its batch, which nobody marked."""
    first = spans[0]
    read = min(first.end, first.start + waited)
    moved = min(first.end, read + copied)
    found = [Span("input", first.start, read), Span("copy", read, moved), Span(IDLE, moved, first.end)]
    return [*(span for span in found if span.end > span.start), *spans[1:]]


class Sampler:
    """Opens a window for one step in so many, and reports what it saw."""

    def __init__(self, hand: Hand, feed: Feed, every: int) -> None:
        self._hand, self._feed, self._every = hand, feed, every
        self._window: StepTimer | None = None

    def step(self) -> None:
        """A step was taken, and whatever follows it within the loop."""
        if self._window is not None:
            sample, self._window = self._window.close(), None
            self._hand.world.line.report(told(self._hand.world, sample))
        if self._hand.num_steps % self._every == self._every - 1:
            self._window = StepTimer(self._hand, self._feed)

    def pause(self) -> None:
        """Something that is no step comes next: a window that is open would count it."""
        if self._window is not None:
            self._window.drop()
            self._window = None


class NoSampler(Sampler):
    """Samples nothing."""

    def __init__(self) -> None:
        pass

    def step(self) -> None:
        pass

    def pause(self) -> None:
        pass


def told(world: World, sample: Sample) -> Event:
    """A sample as an event, with what the device's memory held at the most."""
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else 0
    seconds = {name: round(value, 9) for name, value in sample.seconds.items()}
    about = {"rank": world.rank, "host": world.seat.host, "step": sample.step, "peak": peak}
    return event("profile", seconds=seconds, total=round(sample.total, 9), **about)


@message
@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of one rank's usual step goes: medians over some steps."""

    rank: int
    host: str
    seconds: Mapping[str, float]
    total: float
    """The median step; phases that vary need not add up to it exactly."""
    steps: tuple[int, ...]
    """The steps it is of."""
    peak: int = 0
    """Bytes of the device's memory at the most, on a GPU."""

    @property
    def work(self) -> float:
        """What the rank itself needs, without waiting for others."""
        return max(0.0, self.total - self.seconds.get("communication", 0.0))

    @classmethod
    def of(cls, rank: int, host: str, samples: Iterable[Mapping[str, Any]]) -> Breakdown:
        """From a rank's samples: dicts with step, seconds and total.

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
    """What a run's samples say, by rank; of the ranks that it ended with."""
    found: dict[int, list[Event]] = {}
    for entry in events:
        if entry["kind"] == "profile":
            found.setdefault(entry["rank"], []).append(entry)
        elif entry["kind"] == "recovered":
            found = {rank: taken for rank, taken in found.items() if rank < entry["size"]}
    return tuple(Breakdown.of(rank, found[rank][-1]["host"], found[rank]) for rank in sorted(found))
