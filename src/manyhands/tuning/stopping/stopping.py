"""Base class of early stopping policies. A policy decides whether a trial continues; the study's driver acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..trial import Trial

CONTINUE, PAUSE, STOP = "continue", "pause", "stop"
"""Decisions about a trial at a rung."""
Cost = Callable[[float], float]
"""Function that turns a value of the first objective into a cost to minimize."""


class Stopping(ABC):
    """Base class of early stopping policies, which judge trials at certain epochs, the rungs.

    A policy has no state: it decides from the values that the trials have reported.
    """

    @abstractmethod
    def rungs(self, number: int, epochs: int) -> list[int]:
        """Return the epochs after which trial `number` is judged; the last one is `epochs`, its end."""

    @abstractmethod
    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        """Return the decision for a trial that has just reached a rung: CONTINUE, PAUSE or STOP.

        Args:
            trial: The trial.
            trials: All trials of the study.
            epochs: Number of epochs of a whole trial.
            cost: Turns a reported value into a cost to minimize.
        """

    def promoted(self, trials: Sequence[Trial], epochs: int, cost: Cost, waiting: set[int]) -> Trial | None:
        """Return a paused trial (one whose number is in `waiting`) that must be resumed now, or None."""
        return None

    def next_rung(self, trial: Trial, epochs: int) -> int:
        """Return the epoch up to which a trial is trained before the policy judges it again."""
        return next(rung for rung in self.rungs(trial.number, epochs) if rung > trial.epochs)


class ToTheEnd(Stopping):
    """Stopping policy that trains all trials to the end."""

    def rungs(self, number: int, epochs: int) -> list[int]:
        return [epochs]

    def judge(self, trial: Trial, trials: Sequence[Trial], epochs: int, cost: Cost) -> str:
        return CONTINUE
