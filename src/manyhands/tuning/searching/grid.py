"""Grid search: every combination of values once, with ten values of each continuous range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core import SettingsError
from ..objective import Objective
from ..space import Space
from ..trial import Trial
from .searcher import Constraint, Searcher

NUM_VALUES = 10


class GridSearch(Searcher):
    """Search over all combinations that the constraint allows, in order; the last parameter varies fastest."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        super().__init__(space, objectives, seed)
        self._values = {name: one.grid(NUM_VALUES) for name, one in space.items()}
        self._places: Sequence[int] = range(math.prod(map(len, self._values.values())))

    def keep_to(self, constraint: Constraint) -> None:
        self._places = [place for place in self._places if constraint(self._at(place))]
        if not self._places:
            raise SettingsError(
                "the constraint must accept at least one combination of the grid",
                got=f"none over {', '.join(self._values)}",
                remedy="relax the constraint, or change the space",
            )

    @property
    def size(self) -> int:
        return len(self._places)

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        return self._at(self._places[number])

    def _at(self, number: int) -> dict[str, Any]:
        chosen = {}
        for name in reversed(self._values):
            number, at = divmod(number, len(self._values[name]))
            chosen[name] = self._values[name][at]
        return {name: chosen[name] for name in self.space}
