"""Asynchronous successive halving (ASHA): only the best trials that reach a rung (an epoch) continue to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core import SettingsError
from ..trial import FAILED, Trial
from .stopping import CONTINUE, PAUSE, Cost, Stopping


@dataclass(frozen=True)
class ASHA(Stopping):
    """Asynchronous successive halving: at each rung, the best 1/`factor` of the trials that reached it continue.

    Rungs are the epochs `first`, `first * factor`, `first * factor**2`, …. Other trials are paused with a checkpoint.
    They are resumed if enough later trials are worse.

    >>> ASHA().rungs(0, 27)
    [1, 3, 9, 27]
    """

    factor: int = 3
    first: int = 1

    def __post_init__(self) -> None:
        if self.factor < 2 or self.first < 1:
            raise SettingsError(
                "mh.tuning.ASHA needs a factor of at least 2 and a first rung of at least 1",
                got=f"factor={self.factor}, first={self.first}",
                remedy="use the defaults: mh.tuning.ASHA()",
            )

    def rungs(self, number: int, epochs: int) -> list[int]:
        found, rung = [], self.begin(number, epochs)
        while rung < epochs:
            found.append(rung)
            rung *= self.factor
        return [*found, epochs]

    def begin(self, number: int, epochs: int) -> int:
        """Return the epoch of the first rung of trial `number`; `epochs` is the number of epochs of a whole trial."""
        return self.first

    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        return CONTINUE if trial.number in self._best(trials, trial.epochs, trial, epochs, cost) else PAUSE

    def promoted(self, trials: Sequence[Trial], epochs: int, cost: Cost, waiting: set[int]) -> Trial | None:
        """Return a paused trial that is now among the best of its rung, on the highest rung that has one, or None."""
        best: dict[tuple[int, int], set[int]] = {}  # computed once per rung, not for every paused trial
        for number in sorted(waiting, key=lambda number: (-trials[number].epochs, number)):
            trial = trials[number]
            rung = trial.epochs, self.begin(number, epochs)
            if rung not in best:
                best[rung] = self._best(trials, trial.epochs, trial, epochs, cost)
            if number in best[rung]:
                return trial
        return None

    def _best(self, trials: Sequence[Trial], rung: int, of: Trial, epochs: int, cost: Cost) -> set[int]:
        """Return the numbers of the best 1/`factor` of the trials that reached `rung`, with the same rungs as `of`."""
        begin = self.begin(of.number, epochs)
        there = [
            trial
            for trial in trials
            if rung in trial.reports and trial.state != FAILED and self.begin(trial.number, epochs) == begin
        ]
        there.sort(key=lambda trial: (cost(trial.reports[rung]), trial.number))
        return {trial.number for trial in there[: len(there) // self.factor]}
