"""Base of early stopping policies. A policy decides what to do with a trial; the study's driver does it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..trial import Trial

CONTINUE, PAUSE, STOP = "continue", "pause", "stop"
Cost = Callable[[float], float]


class Stopping(ABC):
    """Judge trials at some of their epochs. A policy is stateless: it only reads the trials' reports."""

    @abstractmethod
    def rungs(self, number: int, epochs: int) -> list[int]:
        """Return the epochs after which a trial is judged; the last one is its end."""

    @abstractmethod
    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        """Return the decision for a trial that has just reached one of its rungs: CONTINUE, PAUSE or STOP."""

    def promoted(self, trials: Sequence[Trial], epochs: int, cost: Cost, waiting: set[int]) -> Trial | None:
        """Return a paused trial that should be resumed now, or None."""
        return None

    def next_rung(self, trial: Trial, epochs: int) -> int:
        """Return the epoch up to which a trial is trained before it is judged again."""
        return next(rung for rung in self.rungs(trial.number, epochs) if rung > trial.epochs)


class ToTheEnd(Stopping):
    """Policy that stops no trial."""

    def rungs(self, number: int, epochs: int) -> list[int]:
        return [epochs]

    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        return CONTINUE
