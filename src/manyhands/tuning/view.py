"""Progress display of a study: a live table of trials in a terminal, a line per finished trial elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..core import counted, format_rough_duration, html_curve, html_lines
from ..monitoring import NotebookOutput, html_progress, in_notebook, sparkline
from .objective import Objective
from .trial import FAILED, FINISHED, RUNNING, STOPPED, Trial, short

NUM_ROWS = 12
NUM_LINES = 8
REFRESH_SECONDS = 0.5
LINE_SECONDS = 1.0
_COLOURS = {RUNNING: "yellow", FINISHED: "green", STOPPED: "cyan", FAILED: "red"}


class StudyView:
    """Base class of progress displays of a study, which the driver notifies of every change of a trial.

    The base class displays nothing. `limit` is the maximum number of trials.
    """

    def __init__(self, objectives: Sequence[Objective], limit: int | None) -> None:
        self._objectives, self._limit = objectives, limit
        self._began = time.monotonic()
        self._num_before = 0
        self.trials: list[Trial] = []
        self._best: Trial | None = None
        self._num_kills: Counter[int] = Counter()
        """Number of deaths of a trial's process that were already displayed, by the number of the trial."""

    def begin(self, trials: list[Trial]) -> None:
        """Set the list of trials, to which the driver adds new ones.

        Trials that have been measured before do not count for the estimate of the time left.
        """
        self.trials = trials
        self._num_before = _num_measured(trials)
        for trial in trials:
            self._look(trial)
            self._num_kills[trial.number] = len(trial.kills)

    def show(self, trial: Trial) -> None:
        """Display a trial whose state or values have changed."""
        self._look(trial)

    def line(self, text: str) -> None:
        """Display a message."""

    def output(self, rank: int, text: str, stream: str) -> None:
        """Display a line that a trial has printed."""

    def close(self) -> None:
        """Draw the final state of the study, and release the terminal."""

    def _look(self, trial: Trial) -> None:
        if len(trial.kills) > self._num_kills[trial.number]:
            self._num_kills[trial.number] = len(trial.kills)
            if not trial.is_over:
                self.line(f"trial {trial.number} is retried (attempt {len(trial.kills) + 1}): {trial.kills[-1]}")
        if trial.state == FINISHED and trial.is_feasible:
            first = self._objectives[0]
            if self._best is None or first.cost(trial.value) < first.cost(self._best.value):
                self._best = trial

    def _summary(self, num_over: int) -> str:
        """Return a text with the number of ended trials, the best trial and the estimated time left."""
        of = f"{num_over} of " if self._limit else ""
        text = of + counted(self._limit or num_over, "trial")
        if self._best is not None:
            shown = ", ".join(f"{name}={short(value)}" for name, value in self._best.params.items())
            text += f"; best {self._objectives[0].name} {self._best.value:.4g} (trial {self._best.number}: {shown})"
        left = self._seconds_left()
        return text if left is None else f"{text}; about {format_rough_duration(left)} left"

    def _seconds_left(self) -> float | None:
        """Return the estimated seconds until the study ends.

        None without a maximum number of trials, and until as many trials are measured as run at the same time.
        """
        measured = _num_measured(self.trials)
        done = measured - self._num_before
        if not self._limit or measured >= self._limit or done < max(1, len(self.trials) - measured):
            return None
        return (self._limit - measured) * (time.monotonic() - self._began) / done


class StudyLineView(StudyView):
    """Progress display for logs and pipes: prints a line when a trial ends, at most one per second."""

    def __init__(self, console: Console, objectives: Sequence[Objective], limit: int | None) -> None:
        super().__init__(objectives, limit)
        self._console = console
        self._num_over = 0
        self._printed_at = 0.0

    def begin(self, trials: list[Trial]) -> None:
        super().begin(trials)
        self._num_over = sum(trial.is_over for trial in trials)

    def show(self, trial: Trial) -> None:
        super().show(trial)
        self._num_over += trial.is_over
        if trial.state == FAILED:
            self.line(f"trial {trial.number} failed: {trial.reason.splitlines()[0]}")
        now = time.monotonic()
        if trial.is_over and (now - self._printed_at > LINE_SECONDS or self._num_over == self._limit):
            self._printed_at = now
            self.line(self._summary(self._num_over))

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def output(self, rank: int, text: str, stream: str) -> None:
        self.line(f"[trial] {text}")


class StudyLiveView(StudyLineView):
    """Progress display for terminals: a live table of the latest trials, with the best trial and the time left."""

    def __init__(self, console: Console, objectives: Sequence[Objective], limit: int | None) -> None:
        super().__init__(console, objectives, limit)
        self._drawn_at = 0.0
        self._live = Live(console=console, auto_refresh=False)
        self._live.start()

    def show(self, trial: Trial) -> None:
        StudyView.show(self, trial)
        self._num_over += trial.is_over
        now = time.monotonic()
        if now - self._drawn_at > REFRESH_SECONDS:
            self._drawn_at = now
            self._live.update(self._draw(), refresh=True)

    def close(self) -> None:
        self._live.update(self._draw(), refresh=True)
        self._live.stop()

    def _draw(self) -> Group:
        table = Table(box=None, padding=(0, 2), header_style="bold")
        names = list(dict.fromkeys(name for trial in self.trials[-NUM_ROWS:] for name in trial.params))
        for column in ("trial", "state", *names, *(one.name for one in self._objectives), "curve"):
            table.add_column(column)
        for trial in self.trials[-NUM_ROWS:]:
            table.add_row(*self._row(trial, names))
        return Group(table, Text(self._summary(self._num_over), style="bold"))

    def _row(self, trial: Trial, names: Sequence[str]) -> list[Any]:
        values = [f"{value:.4g}" for value in trial.values] or [f"{v:.4g}" for v in [*trial.reports.values()][-1:]]
        values += [""] * (len(self._objectives) - len(values))
        mark = " ★" if trial is self._best else ""
        return [
            f"{trial.number}{mark}",
            Text(trial.state, style=_COLOURS[trial.state]),
            *(short(trial.params.get(name, "")) for name in names),
            *values,
            sparkline(list(trial.reports.values()), 20),
        ]


class StudyNotebookView(StudyLineView):
    """Show the progress, the best objective so far and the latest messages in one output of a notebook."""

    def __init__(self, objectives: Sequence[Objective], limit: int | None) -> None:
        super().__init__(Console(stderr=True), objectives, limit)
        self._output = NotebookOutput()
        self._bests: list[float] = []
        self._lines: deque[str] = deque(maxlen=NUM_LINES)
        self._drawn_at = 0.0

    def show(self, trial: Trial) -> None:
        StudyView.show(self, trial)
        self._num_over += trial.is_over
        if trial.state == FAILED:
            self._lines.append(f"trial {trial.number} failed: {trial.reason.splitlines()[0]}")
        if trial.is_over and self._best is not None:
            self._bests.append(self._best.value)
        if time.monotonic() - self._drawn_at > REFRESH_SECONDS:
            self._draw_output()

    def line(self, text: str) -> None:
        self._lines.append(text)
        self._draw_output()

    def close(self) -> None:
        self._draw_output()

    def _draw_output(self) -> None:
        self._drawn_at = time.monotonic()
        progress = html_progress(self._num_over, self._limit, self._summary(self._num_over))
        curve = html_curve(self._bests, f"best {self._objectives[0].name}")
        self._output.update(progress + curve + html_lines(self._lines))


def make_study_view(objectives: Sequence[Objective], limit: int | None, progress: bool | None) -> StudyView:
    """Return the progress display of a study: a live table in a terminal or a notebook, otherwise lines.

    If `progress` is False, the returned display shows nothing.
    """
    if progress is False:
        return StudyView(objectives, limit)
    if in_notebook():
        return StudyNotebookView(objectives, limit)
    console = Console(stderr=True)
    kind = StudyLiveView if console.is_terminal else StudyLineView
    return kind(console, objectives, limit)


def _num_measured(trials: Sequence[Trial]) -> int:
    """Return the number of trials that have ended or have reported a value."""
    return sum(trial.is_over or bool(trial.reports) for trial in trials)
