"""Curves and progress of a run; steps that are repeated after a recovery replace the earlier ones."""

from __future__ import annotations

import math
from typing import Any

from ..core import fields
from .series import Series

MOST_CURVES = 1000
"""Maximum number of curves that are kept per run; a curve takes up to 48 KiB."""
MOST_GAPS = 100
"""Maximum number of steps per curve that are kept of those at which the curve was not finite; the first ones."""
LEAST_SECONDS = 0.2
"""Minimum seconds over which throughput is measured, because times of close events are too imprecise."""


class RunCurves:
    """Losses, metrics, logged values and learning rates of a run, by name."""

    def __init__(self) -> None:
        self.losses: dict[str, Series] = {}
        self.metrics: dict[str, Series] = {}
        self.logged: dict[str, Series] = {}
        self.rates: dict[str, Series] = {}
        self.gaps: dict[str, list[int]] = {}
        """By loss, the first steps at which it was NaN or infinite; by "gradient", those that were skipped."""
        self.has_left_out = False
        """Whether curves were discarded, because there were too many or their names were too long."""

    def series(self) -> dict[str, dict[str, Series]]:
        """Return the curves by group ("losses", "metrics", "logged" or "rates") and name."""
        return {"losses": self.losses, "metrics": self.metrics, "logged": self.logged, "rates": self.rates}

    def on_start(self, entry: dict[str, Any]) -> None:
        if entry["step"]:
            self._forget_after(entry["step"])

    def on_steps(self, entry: dict[str, Any]) -> None:
        steps = entry["steps"]
        for name, values in entry["losses"].items():
            self._curve(self.losses, name).extend(steps, values)
            for at in [at for at, value in enumerate(values) if value is not None and not math.isfinite(value)]:
                self._note_gap(name, steps[at])
        for name, value in (entry.get("lr") or {}).items():
            self._curve(self.rates, name or "lr").add(steps[-1], value)
        for name, value in (entry.get("gradient_norm") or {}).items():
            self._curve(self.logged, f"gradient_norm {name}".rstrip()).add(steps[-1], value)

    def on_skipped(self, entry: dict[str, Any]) -> None:
        self._note_gap("gradient", entry["step"])

    def on_epoch(self, entry: dict[str, Any]) -> None:
        for name, value in entry["metrics"].items():
            self._curve(self.metrics, name).add(entry["step"], value)

    def on_log(self, entry: dict[str, Any]) -> None:
        for name, value in entry["values"].items():
            if fields.number(value):
                self._curve(self.logged, name).add(entry["step"], value)

    def on_recovered(self, entry: dict[str, Any]) -> None:
        self._forget_after(entry["step"])

    def _note_gap(self, name: str, step: int) -> None:
        """Record a step at which a loss, or the gradient, is not finite."""
        if name in self.losses or name == "gradient":
            known = self.gaps.setdefault(name, [])
            if len(known) < MOST_GAPS and step not in known:
                known.append(step)

    def _curve(self, group: dict[str, Series], name: str) -> Series:
        """Return the curve of a name in a group; if there are too many, a new curve that is not kept."""
        if name in group:
            return group[name]
        if sum(map(len, self.series().values())) >= MOST_CURVES or len(name) > fields.LONGEST_NAME:
            self.has_left_out = True
            return Series()
        return group.setdefault(name, Series())

    def _forget_after(self, step: int) -> None:
        """Drop the points of all curves after a step, because the following steps are repeated."""
        for group in self.series().values():
            for series in group.values():
                series.forget_after(step)
        kept = {name: [gap for gap in gaps if gap <= step] for name, gaps in self.gaps.items()}
        self.gaps = {name: gaps for name, gaps in kept.items() if gaps}


class RunProgress:
    """The current step and epoch of a run, its speed, and how it ended."""

    def __init__(self) -> None:
        self.step = self.epoch = 0
        self.total: int | None = None
        self.parameters: int | None = None
        self.end: dict[str, Any] = {}
        self.speed = Series()
        self.seconds, self.epochs = Series(), Series()
        """Seconds since the first event, and completed epochs, by step."""
        self._steps_per_epoch: float | None = None
        self._zero: float | None = None
        self._timed_from: tuple[float, int] | None = None
        self._began_at, self._began_when = 0, 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps since the run was started or resumed."""
        return self.step - self._began_at

    @property
    def steps_per_second(self) -> float | None:
        """Recent steps per second; for a run that has ended, the mean since it was started or resumed."""
        lasted = self.end.get("t", self._began_when) - self._began_when
        if lasted > 0 and self.num_steps > 0:
            return float(self.num_steps / lasted)
        return self.speed.last if len(self.speed) else None

    def on_start(self, entry: dict[str, Any]) -> None:
        self.total, self.parameters, self.end = entry["total"], entry["parameters"], {}
        if entry["total"] and entry.get("epochs"):
            self._steps_per_epoch = entry["total"] / entry["epochs"]
        self._began_when, self._began_at = self._timed_from = entry["t"], entry["step"]
        self._zero = entry["t"] if self._zero is None else self._zero
        if entry["step"]:
            self._resume_at(entry["step"])

    def on_steps(self, entry: dict[str, Any]) -> None:
        self.step, self.epoch = entry["steps"][-1], entry["epoch"]
        self._time(entry["t"])
        self.seconds.add(self.step, entry["t"] - (entry["t"] if self._zero is None else self._zero))

    def clock(self) -> dict[str, Any]:
        """Return what maps steps to seconds and to epochs: points to interpolate, as columns.

        The epochs of a run that has not completed one follow from its planned length.
        """
        epochs = {"x": self.epochs.to_dict()["x"], "y": _ends(self.epochs)}
        if not epochs["x"] and self._steps_per_epoch:
            epochs = {"x": [self._steps_per_epoch], "y": [1.0]}
        return {"seconds": {"x": self.seconds.to_dict()["x"], "y": _ends(self.seconds)}, "epochs": epochs}

    def _time(self, moment: float) -> None:
        """Record the steps per second since the last measurement, including the time of validation and checkpoints."""
        if self._timed_from is None:
            self._timed_from = moment, self.step
        then, step = self._timed_from
        if moment - then >= LEAST_SECONDS and self.step > step:
            self.speed.add(self.step, (self.step - step) / (moment - then))
            self._timed_from = moment, self.step

    def on_epoch(self, entry: dict[str, Any]) -> None:
        self.step, self.epoch = max(self.step, entry["step"]), entry["epoch"] + 1
        self.epochs.add(entry["step"], self.epoch)

    def on_recovered(self, entry: dict[str, Any]) -> None:
        self._resume_at(entry["step"])

    def on_end(self, entry: dict[str, Any]) -> None:
        self.step = max(self.step, entry["step"])
        self.end = {"state": "stopped" if entry.get("stopped") else "finished", "t": entry["t"]}

    def on_failed(self, entry: dict[str, Any]) -> None:
        self.end = {"state": "failed", "t": entry["t"], "reason": entry["reason"]}

    def _resume_at(self, step: int) -> None:
        """Set the current step after a resume or a recovery, and drop the speeds of steps that are repeated."""
        self.step = step
        for series in (self.speed, self.seconds, self.epochs):
            series.forget_after(step)
        self._timed_from = None


def _ends(series: Series) -> list[float]:
    """Return the values of a growing series at the ends of its intervals."""
    columns = series.to_dict()
    return list(columns.get("high", columns["mean"]))
