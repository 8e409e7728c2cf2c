"""Spans: what a rank is doing, from moment to moment of a step, so that its time can be told apart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

from ..distributed import message

IDLE = "idle"
PHASES = ("input", "copy", "forward", "backward", "communication", "optimizer", IDLE)
"""What a step's time goes into; idle is what is left: the host's own work between them, or nothing at all."""


@message
class Span(NamedTuple):
    """A stretch of a step, in seconds from its beginning."""

    name: str
    start: float
    end: float


class Spans:
    """Notes every change of what a rank does; what begins within something else interrupts it.

    On a GPU the moments are those of the device, which the host does not wait for until the end.

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
        """Everything inside belongs to this name, but for what interrupts it."""
        self.begin(name)
        try:
            yield
        finally:
            self.leave()

    def begin(self, name: str) -> None:
        """Something begins."""
        self._open.append(name)
        self._mark(name)

    def leave(self) -> None:
        """It is over, and what it interrupted goes on."""
        self._open.pop()
        self._mark(self._open[-1] if self._open else IDLE)

    @property
    def now(self) -> str:
        """What is going on."""
        return self._open[-1] if self._open else IDLE

    def end(self) -> list[Span]:
        """All of it, up to now; on a GPU once the device is done."""
        self._mark(IDLE)
        moments = self._moments()
        names = [name for name, _ in self._marks]
        return [Span(name, *ends) for name, ends in zip(names, pairwise(moments), strict=False)]

    def _mark(self, name: str) -> None:
        if self._device.type != "cuda":
            self._marks.append((name, time.perf_counter()))
            return
        if torch.cuda.is_current_stream_capturing():
            return  # what is recorded now runs later
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
    """Seconds by what they went into.

    >>> by_phase([Span("idle", 0.0, 1.0), Span("forward", 1.0, 3.0), Span("idle", 3.0, 3.5)])
    {'idle': 1.5, 'forward': 2.0}
    """
    total: Counter[str] = Counter()
    for span in spans:
        total[span.name] += span.end - span.start  # type: ignore[assignment]
    return dict(total)
