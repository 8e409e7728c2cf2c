"""Early stopping: which trials go on. A policy says what to do with a trial; the study's driver does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..trial import Trial

GO_ON, PAUSE, STOP = "go on", "pause", "stop"
Cost = Callable[[float], float]


class Stopping(ABC):
    """Judges trials after some of their epochs. It keeps no state: all it needs stands in the trials' reports."""

    @abstractmethod
    def rungs(self, number: int, epochs: int) -> list[int]:
        """The epochs after which a trial is judged; the last one is its end."""

    @abstractmethod
    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        """What becomes of a trial that has just come to one of its rungs: GO_ON, PAUSE or STOP."""

    def promoted(self, trials: Sequence[Trial], epochs: int, cost: Cost, waiting: set[int]) -> Trial | None:
        """One of those that wait, if it is to go on now."""
        return None

    def next_rung(self, trial: Trial, epochs: int) -> int:
        """How far a trial goes before it is judged again."""
        return next(rung for rung in self.rungs(trial.number, epochs) if rung > trial.epochs)


class ToTheEnd(Stopping):
    """No trial is stopped."""

    def rungs(self, number: int, epochs: int) -> list[int]:
        return [epochs]

    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        return GO_ON
