"""Progress display of a run in a notebook: one output that is updated in place."""

from __future__ import annotations

import sys
import time
from collections import deque
from html import escape
from typing import Any

from ..core import Event, format_rough_duration, html_curve, html_lines
from .progress import REFRESH_SECONDS, View, event_text

NUM_LINES = 8
"""Number of latest messages that the output shows."""
MOST_LOSSES = 4096
"""Number of losses that are kept for the curve; beyond it every second one is dropped."""


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which displays HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


class NotebookOutput:
    """An output of the cell that runs, whose HTML can be replaced."""

    def __init__(self) -> None:
        from IPython import display as ipython

        shown: Any = ipython  # without types
        self._html = shown.HTML
        self._handle = shown.display(shown.HTML(""), display_id=True)

    def update(self, html: str) -> None:
        """Replace what the output shows."""
        self._handle.update(self._html(html))


def html_progress(done: int, total: int | None, text: str) -> str:
    """Return a progress bar with a text beside it.

    >>> html_progress(2, 4, "2 of 4")
    '<div><progress value="2" max="4"></progress> 2 of 4</div>'
    """
    bar = f'<progress value="{done}" max="{total}"></progress> ' if total else ""
    return f"<div>{bar}{escape(text)}</div>"


class NotebookView(View):
    """Shows a progress bar, the time left, the loss curve, the last metrics and the latest messages."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._output = NotebookOutput()
        self._total: int | None = None
        self._began, self._first, self._step = time.monotonic(), 0, 0
        self._losses: list[float] = []
        self._name, self._rate, self._metrics, self._end = "loss", 0.0, "", ""
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._drawn_at = 0.0

    def show(self, rank: int, entry: Event) -> None:
        kind = entry["kind"]
        if kind == "start":
            self._total, self._first, self._step = entry["total"], entry["step"], entry["step"]
            self._began = time.monotonic()
        elif kind == "steps":
            self._name, values = next(iter(entry["losses"].items()))
            self._losses.extend(value for value in values if value is not None)
            if len(self._losses) > MOST_LOSSES:
                self._losses = self._losses[1::2]
            self._rate, self._step = entry["samples_per_second"], entry["steps"][-1]
        elif kind == "epoch":
            self._metrics = event_text(entry)
        elif kind == "end":
            self._step = entry["step"]
            self._end = "stopped" if entry["stopped"] else "finished"
        elif kind == "failed":
            self._end = "failed"
        elif text := event_text(entry):
            self._lines.append(text)
        if time.monotonic() - self._drawn_at > REFRESH_SECONDS:
            self._draw()

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._draw()

    def close(self) -> None:
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        parts = [
            f"<div>{escape(self._title)}</div>",
            html_progress(self._step, self._total, self._progress()),
            html_curve(self._losses, self._name),
            html_lines([self._metrics] if self._metrics else []),
            html_lines(self._lines),
        ]
        self._output.update("".join(parts))

    def _progress(self) -> str:
        """Return the step, the speed, the loss, and the time left or how the run ended."""
        of = f" of {self._total}" if self._total else ""
        texts = [f"step {self._step}{of}"]
        if self._losses:
            texts.append(f"{self._name} {self._losses[-1]:.4f}")
            texts.append(f"{self._rate:,.0f} samples/s")
        left = self._seconds_left()
        if self._end:
            texts.append(self._end)
        elif left is not None:
            texts.append(f"about {format_rough_duration(left)} left")
        return ", ".join(texts)

    def _seconds_left(self) -> float | None:
        done = self._step - self._first
        if not self._total or done < 1:
            return None
        return (self._total - self._step) * (time.monotonic() - self._began) / done
