"""Hyperband: several successive halvings side by side, which begin to judge earlier or later."""

from __future__ import annotations

from dataclasses import dataclass

from .asha import ASHA


@dataclass(frozen=True)
class Hyperband(ASHA):
    """Brackets of ASHA in turn: as many as there are rungs, each beginning one rung later than the one before.

    >>> [Hyperband().rungs(number, 9) for number in (0, 9, 12)]
    [[1, 3, 9], [3, 9], [9]]
    """

    def begin(self, number: int, epochs: int) -> int:
        """Brackets take turns in proportion to how many trials each can afford for the same number of epochs."""
        starts = ASHA(self.factor, self.first).rungs(number, epochs)
        shares = [max(1, epochs // start) for start in starts]
        place = number % sum(shares)
        for start, share in zip(starts, shares, strict=True):
            if place < share:
                return start
            place -= share
        raise AssertionError
