"""Base of searchers, which propose parameters depending on the seed, the trial's number and earlier results.

No state is saved: a searcher gets the whole history, so a study that was killed resumes with the same sequence.
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
"""Returns whether parameters may be tried."""


class Searcher(ABC):
    """Base class of objects that propose parameters."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self.space, self.objectives, self.seed = space, objectives, seed

    @property
    def size(self) -> int | None:
        """Return the number of possible proposals; None if unlimited."""
        return None

    def keep_to(self, constraint: Constraint) -> None:  # noqa: B027 - most are asked again until they do
        """Drop proposals that violate the constraint, for searchers that know all proposals beforehand."""

    def is_ready(self, number: int, history: Sequence[Trial]) -> bool:
        """Return whether enough trials have ended to propose this one."""
        return True

    def observe(self, trial: Trial) -> None:  # noqa: B027 - most keep nothing
        """Take a trial that has ended; when a study is resumed, called again for all of them."""

    @abstractmethod
    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        """Return the parameters of a trial; another `draw` gives others, if the first ones are not allowed."""

    def random(self, number: int, draw: int = 0) -> np.random.Generator:
        """Return the random generator of one proposal."""
        return np.random.default_rng([self.seed, number, draw])
