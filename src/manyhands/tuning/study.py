"""Study: the trials and results of tuning, read from the folder of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..core import CheckpointError, SettingsError, Task, counted, html_lines, html_table
from ..training import Run
from .journal import JOURNAL, read_journal
from .objective import Objective
from .plots import KINDS, write_plot
from .recommendations import importances, importances_if_possible, recommendations
from .space import described_ranges
from .trial import FAILED, FINISHED, Trial, short

TRIALS = "trials"
NUM_SHOWN = 5
"""Number of best trials that a notebook shows."""


class Study:
    """A finished or stopped study, opened from its folder.

    `study.best` is the best trial, and `study.trials` has all trials. `study.dataframe()` returns a pandas table, and
    `study.plot("history")` writes a page. optuna-dashboard can read the journal `study.path / "journal.log"`.

    Args:
        path: The study's folder.
        task: The tuned function; needed to open the runs of trials with their tasks.
        params: Fixed arguments of `task`; by default those in the journal.
        trials: The trials; by default those in the journal.
        stopped: Whether the study was stopped before its budget was used up.

    Raises:
        CheckpointError: The folder has no journal, or the journal has no objective.
    """

    def __init__(
        self,
        path: str | Path,
        task: Callable[..., Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        trials: list[Trial] | None = None,
        stopped: bool = False,
    ) -> None:
        self.path, self.task, self.stopped = Path(path), task, stopped
        if not (self.path / JOURNAL).exists():
            raise CheckpointError(
                f"a study must be a folder with a {JOURNAL}", got=str(path), remedy="pass a folder under studies/"
            )
        self.record, read = read_journal(self.path)
        if not self.record.get("objectives"):
            raise CheckpointError(
                "the journal of a study must contain its objective",
                got=f"{path}, which was interrupted before the objective was written",
                remedy="run mh.tune with the name of this study and resume=True",
            )
        # The journal has the fixed parameters too, but only as JSON.
        self._params = dict((self.record.get("params") or {}) if params is None else params)
        self.trials = read if trials is None else trials
        self.objectives = [Objective(*one) for one in self.record["objectives"]]

    @property
    def name(self) -> str:
        """The study's name, which is that of its folder."""
        return self.path.name

    @property
    def finished(self) -> list[Trial]:
        """Trials that were trained to the end and satisfy the limits, in order of their numbers."""
        return [trial for trial in self.trials if trial.state == FINISHED and trial.is_feasible]

    @property
    def best(self) -> Trial:
        """The best finished trial, by the first objective."""
        return self.top(1)[0]

    def top(self, num: int) -> list[Trial]:
        """Return the best `num` finished trials by the first objective, best first.

        Raises:
            SettingsError: No trial has finished.
        """
        if not self.finished:
            raise SettingsError(
                "a study has no best trial before one has finished",
                got=f"{counted(len(self.trials), 'trial')}, none of which has finished",
                remedy="see the reason of each trial in study.trials",
            )
        first = self.objectives[0]
        return sorted(self.finished, key=lambda trial: (first.cost(trial.value), trial.number))[:num]

    @property
    def front(self) -> list[Trial]:
        """The Pareto front: finished trials for which no other is at least as good in all objectives and better in one.

        With one objective, these are the best trials.
        """
        costs = {
            trial.number: [one.cost(value) for one, value in zip(self.objectives, trial.values, strict=True)]
            for trial in self.finished
        }

        def is_beaten(mine: list[float]) -> bool:
            return any(
                other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in costs.values()
            )

        return [trial for trial in self.finished if not is_beaten(costs[trial.number])]

    def run(self, trial: Trial | None = None) -> Run:
        """Return the run of a trial, by default of the best one.

        Raises:
            CheckpointError: The run was deleted: a study keeps only those of its best `keep` trials.
        """
        chosen = self.best if trial is None else trial
        folder = self.path / TRIALS / f"{chosen.number:05d}"
        if not folder.exists():
            raise CheckpointError(
                "a trial must be one of the best of its study, because only their runs are kept",
                got=f"trial {chosen.number}",
                remedy="choose one of study.top(), or tune with options=mh.options.Selection(keep=...) and a larger "
                "number",
            )
        task = self.task(**{**self._params, **chosen.params}) if self.task is not None else None
        return Run(folder, task if isinstance(task, Task) else None)

    def dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per trial; raise SettingsError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise SettingsError(
                "a dataframe needs pandas, which is not installed",
                remedy="install it with pip install 'manyhands[tune]'",
            ) from None
        rows = [
            {
                "number": trial.number,
                "state": trial.state,
                **{f"params_{name}": value for name, value in trial.params.items()},
                **{one.name: value for one, value in zip(self.objectives, trial.values, strict=False)},
                **{f"metric_{name}": value for name, value in trial.metrics.items()},
                "seconds": trial.seconds,
                "reason": trial.reason,
            }
            for trial in self.trials
        ]
        return pandas.DataFrame(rows)

    def importance(self) -> dict[str, float]:
        """Return the share of every parameter in the differences between trials, largest first.

        Optuna computes them. Empty with fewer than ten finished trials, or with a single parameter.
        """
        return importances(self.path / JOURNAL)

    @property
    def recommendations(self) -> list[str]:
        """What to try next, most useful first; empty with fewer than ten finished trials."""
        return self._recommended(importances_if_possible(self.path / JOURNAL))

    def conclusions(self) -> list[str]:
        """Return the importance of the parameters, where it is known, and what to try next, as lines of text."""
        found = importances_if_possible(self.path / JOURNAL)
        shown = ", ".join(f"{name} {share:.0%}" for name, share in found.items())
        return [*([f"importance of the parameters: {shown}"] if shown else []), *self._recommended(found)]

    def _recommended(self, importance: Mapping[str, float]) -> list[str]:
        if self.record.get("search") == "grid":
            return []
        ranges = described_ranges(self.record.get("space") or {})
        best = self.top(len(self.finished)) if self.finished else []
        return recommendations(best, self.finished, ranges, importance)

    def plot(self, kind: str = "history", path: str | Path | None = None) -> Path:
        """Write a plot of the study as an HTML page, and return its path.

        Args:
            kind: "history", "parallel", "importance", "contour", "slice" or "front".
            path: The file to write; by default the kind with the suffix .html, in the study's folder.

        Raises:
            SettingsError: The kind is unknown, a package is missing, or too few trials have finished.
        """
        if kind not in KINDS:
            raise SettingsError(
                f"a plot must be one of {', '.join(KINDS)}", got=repr(kind), remedy="choose one of them"
            )
        target = self.path / f"{kind}.html" if path is None else Path(path)
        write_plot(self.path / JOURNAL, kind, [one.name for one in self.objectives], target)
        return target

    def to_dict(self) -> dict[str, Any]:
        """Return a summary as JSON-ready data: the best trial, and the number of trials in each state."""
        states = [trial.state for trial in self.trials]
        best = self.best if self.finished else None
        return {
            "study": str(self.path),
            "name": self.name,
            "best": None if best is None else {"number": best.number, "params": best.params, "metrics": best.metrics},
            "trials": {state: states.count(state) for state in sorted(set(states))},
            "objectives": [one.name for one in self.objectives],
            "stopped": self.stopped,
        }

    def __repr__(self) -> str:
        best = ""
        if self.finished:
            best = f", best {self.objectives[0].name}={self.best.value:.4g} with {self.best.params}"
        num_failed = sum(trial.state == FAILED for trial in self.trials)
        failed = f", {num_failed} failed" if num_failed else ""
        return f"Study({self.name!r}, {counted(len(self.trials), 'trial')}{failed}{best})"

    def _repr_html_(self) -> str:
        best = self.top(NUM_SHOWN) if self.finished else []
        names = list(dict.fromkeys(name for trial in best for name in trial.params))
        rows = [
            (trial.number, *(short(trial.params.get(name, "")) for name in names), *map(short, trial.values))
            for trial in best
        ]
        header = ("trial", *names, *(one.name for one in self.objectives))
        states = ", ".join(f"{count} {state}" for state, count in self.to_dict()["trials"].items())
        table = html_table(f"study {self.name}: the best of {counted(len(self.trials), 'trial')}", rows, header)
        lines = [f"trials: {states or 'none'}", *self.conclusions(), str(self.path)]
        return table + html_lines(lines)
