"""Grid search: every combination once; of a range that has no end to its values, ten of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..objective import Objective
from ..space import Space
from ..trial import Trial
from .searcher import Searcher

NUM_VALUES = 10


class GridSearch(Searcher):
    """Goes through all combinations, the last parameter fastest."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        super().__init__(space, objectives, seed)
        self._values = {name: one.grid(NUM_VALUES) for name, one in space.items()}

    @property
    def size(self) -> int:
        return math.prod(map(len, self._values.values()))

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        chosen = {}
        for name in reversed(self._values):
            number, at = divmod(number, len(self._values[name]))
            chosen[name] = self._values[name][at]
        return {name: chosen[name] for name in self.space}
