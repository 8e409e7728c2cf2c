"""The pushes that a server has applied, so that none is applied twice."""

from __future__ import annotations

from collections.abc import Sequence


class Ledger:
    """A set of non-negative integers that are mostly consecutive.

    >>> ledger = Ledger()
    >>> for number in (0, 2, 1, 5):
    ...     ledger.add(number)
    >>> [number for number in range(7) if number in ledger], len(ledger)
    ([0, 1, 2, 5], 4)
    """

    def __init__(self, state: Sequence[int] = (0,)) -> None:
        self._below = state[0]
        self._others = set(state[1:])

    @property
    def state(self) -> list[int]:
        """The set in compact form: all numbers below the first entry, and the remaining entries themselves.

        >>> Ledger([2, 5]).state, len(Ledger([2, 5]))
        ([2, 5], 3)
        """
        return [self._below, *sorted(self._others)]

    def add(self, number: int) -> None:
        """Add a push; adding one twice is a bug in manyhands."""
        assert number not in self, f"push {number} was applied before"
        self._others.add(number)
        while self._below in self._others:
            self._others.remove(self._below)
            self._below += 1

    def __contains__(self, number: int) -> bool:
        return number < self._below or number in self._others

    def __len__(self) -> int:
        return self._below + len(self._others)
