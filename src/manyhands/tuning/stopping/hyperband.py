"""Hyperband: several successive halvings in parallel, with different first rungs."""

from __future__ import annotations

from dataclasses import dataclass

from .asha import ASHA


@dataclass(frozen=True)
class Hyperband(ASHA):
    """ASHA brackets, as many as there are rungs, each starting one rung later than the previous one.

    >>> [Hyperband().rungs(number, 9) for number in (0, 9, 12)]
    [[1, 3, 9], [3, 9], [9]]
    """

    def begin(self, number: int, epochs: int) -> int:
        """Return the first rung of a trial's bracket; brackets get trials in proportion to what each can afford."""
        starts = ASHA(self.factor, self.first).rungs(number, epochs)
        shares = [max(1, epochs // start) for start in starts]
        place = number % sum(shares)
        for start, share in zip(starts, shares, strict=True):
            if place < share:
                return start
            place -= share
        raise AssertionError
