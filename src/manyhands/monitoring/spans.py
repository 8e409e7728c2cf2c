"""Spans: the phases of a step on one rank over time, for profiles; and the total times of other work."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch

from ..distributed import World, message

IDLE = "idle"
PHASES = ("input", "copy", "forward", "backward", "communication", "optimizer", IDLE)
"""The phases of a step. Idle is the time outside of the other phases, such as host work between them."""
_UNTIMED = nullcontext()


@message
class Span(NamedTuple):
    """An interval of a step that belongs to one phase; start and end are seconds since the step's beginning."""

    name: str
    start: float
    end: float


class Spans:
    """Record the phases of a step on one rank; a phase that begins within another one interrupts it.

    On a GPU, times are measured with CUDA events, and the host synchronizes only at the beginning and in `end`.

    >>> spans = Spans(torch.device("cpu"))
    >>> with spans.during("backward"):
    ...     with spans.during("communication"):
    ...         pass
    >>> [span.name for span in spans.end()]
    ['idle', 'backward', 'communication', 'backward', 'idle']
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._mark(IDLE)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Attribute the time in this context to a phase, except for that of phases that interrupt it."""
        self.begin(name)
        try:
            yield
        finally:
            self.leave()

    def begin(self, name: str) -> None:
        """Begin a phase, which interrupts the current one until `leave` is called."""
        self._open.append(name)
        self._mark(name)

    def leave(self) -> None:
        """End the current phase and resume the one it interrupted."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else IDLE)

    @property
    def now(self) -> str:
        """The current phase."""
        return self._open[-1] if self._open else IDLE

    def end(self) -> list[Span]:
        """Return all spans since the beginning of the step; on a GPU, wait for the device first."""
        self._mark(IDLE)
        moments = self._moments()
        names = [name for name, _ in self._marks]
        return [Span(name, *ends) for name, ends in zip(names, pairwise(moments), strict=False)]

    def _mark(self, name: str) -> None:
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        if torch.cuda.is_current_stream_capturing():
            return  # captured operations run later, so their time cannot be measured here
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        self._marks.append((name, moment))

    def _moments(self) -> list[float]:
        first, last = self._marks[0][1], self._marks[-1][1]
        if isinstance(first, float):
            return [moment - first for _, moment in self._marks]  # type: ignore[operator]
        assert not isinstance(last, float)
        last.synchronize()
        return [first.elapsed_time(moment) / 1e3 for _, moment in self._marks]  # type: ignore[arg-type]


def by_phase(spans: list[Span]) -> dict[str, float]:
    """Return the total seconds of each phase.

    >>> by_phase([Span("idle", 0.0, 1.0), Span("forward", 1.0, 3.0), Span("idle", 3.0, 3.5)])
    {'idle': 1.5, 'forward': 2.0}
    """
    total: Counter[str] = Counter()
    for span in spans:
        total[span.name] += span.end - span.start  # type: ignore[assignment]
    return dict(total)


class PhaseTimes:
    """Measures a replica's work other than input, sync and compute, and records phases while a step is timed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seconds = {"optimizer": 0.0, "save": 0.0, "validation": 0.0}
        """Seconds this replica spent on work other than input, sync and compute."""
        self.spans: Spans | None = None
        """Records the phases of a step while that step is timed."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of the enclosed block to `seconds`; waiting for other replicas counts as sync instead."""
        start, waited = time.perf_counter(), self._world.waited
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start - (self._world.waited - waited)

    def during(self, what: str) -> AbstractContextManager[None]:
        """Attribute the enclosed block to this phase of the step, where the step is timed."""
        return _UNTIMED if self.spans is None else self.spans.during(what)
