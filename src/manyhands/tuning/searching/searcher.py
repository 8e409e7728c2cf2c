"""Base class of searchers, which propose parameters from the seed, the trial's number and earlier results.

A searcher saves no state: it gets all earlier trials, so a study that was killed resumes with the same proposals.
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
"""Function that returns whether parameters may be tried."""


class Searcher(ABC):
    """Base class of searchers, which propose the parameters of trials.

    Args:
        space: The range of each parameter.
        objectives: The metrics to optimize.
        seed: Seed of all random choices.
    """

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self.space, self.objectives, self.seed = space, objectives, seed

    @property
    def size(self) -> int | None:
        """Return the number of different proposals, such as the size of a grid; None if it is not limited."""
        return None

    def keep_to(self, constraint: Constraint) -> None:  # noqa: B027 - the driver rejects proposals of most searchers
        """Remove the proposals that violate the constraint, in a searcher that knows all proposals in advance."""

    def is_ready(self, number: int, history: Sequence[Trial]) -> bool:
        """Return whether enough trials of `history` have ended to propose trial `number`."""
        return True

    def observe(self, trial: Trial) -> None:  # noqa: B027 - most searchers keep no data
        """Learn from a trial that has ended. A study that is resumed calls this again for every earlier trial."""

    @abstractmethod
    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        """Return the parameters of a new trial.

        The result must depend only on the arguments, the seed and the space.

        Args:
            number: The number of the new trial.
            history: All earlier trials.
            draw: Number of earlier proposals for this trial that violated the constraint.
        """

    def random(self, number: int, draw: int = 0) -> np.random.Generator:
        """Return the random generator for one proposal, which depends on the seed, the trial's number and the draw."""
        return np.random.default_rng([self.seed, number, draw])
