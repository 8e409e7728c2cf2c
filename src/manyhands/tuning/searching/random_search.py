"""Random search: every parameter is drawn from its range, independent of earlier trials."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..trial import Trial
from .searcher import Searcher


class RandomSearch(Searcher):
    """Search by drawing every parameter at random from its range."""

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        random = self.random(number, draw)
        return {name: one.at(random.random()) for name, one in self.space.items()}
