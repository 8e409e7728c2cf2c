"""Searchers: who proposes the next parameters. A proposal depends on the seed, the trial's number and what is known.

No state is saved: a searcher is asked with the whole history, so a study that was killed goes on with the same
sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..objective import Objective
from ..space import Space
from ..trial import Trial

Constraint = Callable[[dict[str, Any]], bool]
"""Says whether parameters may be tried."""


class Searcher(ABC):
    """Proposes parameters."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self.space, self.objectives, self.seed = space, objectives, seed

    @property
    def size(self) -> int | None:
        """How many proposals there are; None where there is no end."""
        return None

    def keep_to(self, constraint: Constraint) -> None:  # noqa: B027 - most are asked again until they do
        """Leaves out what the constraint does not allow, where all that will be proposed is known."""

    def is_ready(self, number: int, history: Sequence[Trial]) -> bool:
        """Whether enough is known to propose this trial, or others must end before."""
        return True

    def hear(self, trial: Trial) -> None:  # noqa: B027 - most keep nothing
        """A trial has ended; when a study goes on, all that had are told again."""

    @abstractmethod
    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        """The parameters of a trial; another `draw` gives others, where the first ones are not allowed."""

    def random(self, number: int, draw: int = 0) -> np.random.Generator:
        """The random numbers of one proposal."""
        return np.random.default_rng([self.seed, number, draw])
