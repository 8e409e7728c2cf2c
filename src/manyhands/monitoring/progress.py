"""Progress display of a run: a live display in a terminal, otherwise one line per epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..core import Event, counted, format_bytes

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "compute": "green",
    "input": "yellow",
    "sync": "red",
    "optimizer": "blue",
    "save": "magenta",
    "validation": "cyan",
}
REFRESH_SECONDS = 0.5
"""Minimum seconds between two refreshes of the live display."""


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return a curve of at most `width` block characters that shows the values; empty without values.

    >>> sparkline([0, 1, 2, 3], width=4)
    '▁▃▆█'
    """
    if not values:
        return ""
    step = max(1, len(values) / width)
    picked = [values[min(len(values) - 1, int(i * step))] for i in range(min(width, len(values)))]
    low, high = min(picked), max(picked)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in picked)


def share_bar(seconds: dict[str, float], width: int = 30) -> Text:
    """Return a coloured bar and text that show on which activities a replica has spent its time.

    Args:
        seconds: Seconds by activity, and the sum as "total".
        width: Width of a full bar in characters.
    """
    total = seconds.get("total", 0.0) or 1e-9
    text = Text()
    for name, colour in _COLOURS.items():
        text.append("█" * round(width * seconds.get(name, 0.0) / total), style=colour)
    waits = {name: seconds.get(name, 0.0) / total for name in _COLOURS if name != "compute"}
    name, share = max(waits.items(), key=lambda item: item[1])
    text.append(f"  {100 * seconds.get('compute', 0.0) / total:.0f}% compute", style="green")
    if share >= 0.005:
        text.append(f", {100 * share:.0f}% {name}", style=_COLOURS[name])
    return text


class View:
    """Display of a run's events. This base class displays only what ranks print."""

    def show(self, rank: int, entry: Event) -> None:
        """Handle an event of one rank."""

    def line(self, text: str) -> None:
        """Display a line of text."""

    def output(self, rank: int, text: str, stream: str) -> None:
        """Print a line that a rank has printed, to the same stream ("stdout" or "stderr")."""
        print(f"[rank {rank}] {text}", file=getattr(sys, stream), flush=True)

    def close(self) -> None:
        """Draw the final state, and stop updating the terminal."""


class LineView(View):
    """View that prints one line per epoch or notice, for logs and pipes."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title

    def show(self, rank: int, entry: Event) -> None:
        if text := event_text(entry):
            self.line(f"{self._title}  {text}")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveView(LineView):
    """View that shows a progress bar, the loss curve, samples per second, and how each replica spends its time."""

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(console, title)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task(title, total=None)
        self._losses: list[float] = []
        self._rate = 0.0
        self._learning_rates: dict[str, float] = {}
        self._waits: dict[int, dict[str, float]] = {}
        self._limits: dict[int, str] = {}
        self._drawn_at = 0.0
        # No automatic refresh, because its thread would take time from training in the same process.
        self._live = Live(self._draw(), console=console, auto_refresh=False)
        self._live.start()

    def show(self, rank: int, entry: Event) -> None:
        kind = entry["kind"]
        if kind == "start":
            self._bar.update(self._task, total=entry["total"], completed=entry["step"])
        elif kind == "steps":
            self._losses.extend(next(iter(entry["losses"].values())))
            self._rate = entry["samples_per_second"]
            self._learning_rates = entry.get("lr", {})
            self._bar.update(self._task, completed=entry["steps"][-1])
        elif kind == "waits":
            self._waits[entry["rank"]] = entry["seconds"]
            self._limits[entry["rank"]] = entry.get("limit", "")
        elif text := event_text(entry):
            self.line(text)
        if time.monotonic() - self._drawn_at > REFRESH_SECONDS:
            self._refresh()

    def output(self, rank: int, text: str, stream: str) -> None:
        if stream == "stdout" and not sys.stdout.isatty():
            super().output(rank, text, stream)
        else:
            self.line(f"[rank {rank}] {text}")

    def close(self) -> None:
        self._refresh()
        self._live.stop()

    def _refresh(self) -> None:
        self._drawn_at = time.monotonic()
        self._live.update(self._draw(), refresh=True)

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        if self._losses:
            rate = f"{self._rate:,.0f} samples/s"
            rates = "  ".join(f"{name} lr {value:.3g}".lstrip() for name, value in self._learning_rates.items())
            table.add_row("loss", f"{self._losses[-1]:.4f}  {sparkline(self._losses)}  {rate}  {rates}".rstrip())
        for rank, seconds in sorted(self._waits.items()):
            limit = _limit(self._limits[rank], seconds)
            table.add_row(f"replica {rank}", share_bar(seconds).append(limit, style="dim"))
        return Group(self._bar, table)


def _limit(limit: str, seconds: Mapping[str, float]) -> str:
    """Return a text that names what limits the speed of a replica; empty if that is unknown.

    `limit` is "compute" also if the replica waits for other replicas, so that case is detected from its times.
    """
    if limit == "compute" and seconds.get("sync", 0.0) > seconds.get("compute", 0.0):
        limit = "sync"
    return f"  limit: {limit}" if limit else ""


def event_text(entry: Event) -> str:
    """Return an event as text; empty for events that are not displayed as text."""
    if entry["kind"] == "epoch":
        return f"epoch {entry['epoch'] + 1}  step {entry['step']}  {_values(entry)}"
    if entry["kind"] == "log":
        return f"step {entry['step']}  {_pairs(entry['values'])}"
    if entry["kind"] == "lost":
        return f"rank {entry['rank']} on {entry['host']} {entry['reason']}"
    if entry["kind"] == "recovered":
        return f"resumed from step {entry['step']} with {counted(entry['size'], 'replica')}, from {entry['source']}"
    if entry["kind"] == "split":
        return "\n".join(["where everything goes", *entry["lines"]])
    if entry["kind"] == "used" and entry["rank"] == 0:
        parts = ", ".join(f"{name} {format_bytes(entry[name])}" for name in ("parameters", "optimizer"))
        whole = "its process, torch and all," if entry["device"] == "cpu" else "all in all"
        return f"the first device really held {parts}; {whole} {format_bytes(entry['peak'])} at most"
    if entry["kind"] == "verdict" and entry["why"] == "nothing is split":
        return ""
    return str(entry["text"]) if entry["kind"] in ("notice", "straggler", "hang", "verdict", "coordinator") else ""


def make_view(title: str, progress: bool | None, *, live: bool = True) -> View:
    """Return a view of a run.

    Args:
        title: Title of the progress bar and of the lines.
        progress: False for a view that displays only what ranks print.
        live: Whether to use a live display in a terminal or a notebook; otherwise lines are printed.
    """
    from .notebook import NotebookView, in_notebook

    if progress is False:
        return View()
    if live and in_notebook():
        return NotebookView(title)
    console = Console(stderr=True)
    if live and console.is_terminal:
        return LiveView(console, title)
    return LineView(console, title)


def _values(entry: dict[str, Any]) -> str:
    return _pairs({**entry["losses"], **entry["metrics"]})


def _pairs(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
