"""Hyperband: several brackets of successive halving in parallel, each with another first rung."""

from __future__ import annotations

from dataclasses import dataclass

from .asha import ASHA


@dataclass(frozen=True)
class Hyperband(ASHA):
    """Several brackets of ASHA in parallel; the first rung of each is one rung later than that of the previous one.

    >>> [Hyperband().rungs(number, 9) for number in (0, 9, 12)]
    [[1, 3, 9], [3, 9], [9]]
    """

    def begin(self, number: int, epochs: int) -> int:
        """Return the epoch of the first rung in the bracket of trial `number`.

        The number of trials of a bracket is inversely proportional to the epoch of its first rung.
        """
        starts = ASHA(self.factor, self.first).rungs(number, epochs)
        shares = [max(1, epochs // start) for start in starts]
        place = number % sum(shares)
        for start, share in zip(starts, shares, strict=True):
            if place < share:
                return start
            place -= share
        raise AssertionError
