"""Random search: every proposal by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..trial import Trial
from .searcher import Searcher


class RandomSearch(Searcher):
    """Draws every parameter from its range."""

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        random = self.random(number, draw)
        return {name: one.at(random.random()) for name, one in self.space.items()}
