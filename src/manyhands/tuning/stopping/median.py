"""Median rule: stop a trial whose best value so far is worse than the median of the others at that point."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ...core import SettingsError
from ..trial import FAILED, Trial
from .stopping import CONTINUE, STOP, Cost, Stopping


@dataclass(frozen=True)
class Median(Stopping):
    """Stop a trial after an epoch if its best value so far is worse than the median of the other trials at that epoch.

    Trials are judged after every epoch from `first` on, if at least `others` other trials have reached the epoch.

    >>> Median().rungs(0, 3)
    [1, 2, 3]
    """

    first: int = 1
    others: int = 5

    def __post_init__(self) -> None:
        if self.first < 1 or self.others < 1:
            got = f"first={self.first}, others={self.others}"
            raise SettingsError(
                "first and others of mh.tuning.Median must be at least 1",
                got=got,
                remedy="use the defaults: mh.tuning.Median()",
            )

    def rungs(self, number: int, epochs: int) -> list[int]:
        return [*range(self.first, epochs), epochs]

    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        epoch = trial.epochs
        others = [
            cost(other.reports[epoch])
            for other in trials
            if other is not trial and epoch in other.reports and other.state != FAILED
        ]
        if len(others) < self.others:
            return CONTINUE
        best = min(cost(value) for value in trial.reports.values())
        return STOP if best > statistics.median(others) else CONTINUE
