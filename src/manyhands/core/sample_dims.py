"""Find out which dim of a random draw holds the samples, by computing with two numbers of rows.

A single shape is ambiguous: 8 may be rows, or entries of a table. Comparing 3 rows with 5 decides: the dim that
changes from 3 to 5 (or from 12 to 20) holds the samples, and a draw whose shape does not change belongs to no sample.
A draw is identified by its number among the step's random calls, or by its shape if a branch has shifted the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """An observed random draw: the dim that holds the samples (None if no dim does), and its shape for one row."""

    dim: int | None
    shape: Sizes

    def at(self, rows: int) -> Sizes:
        """Return the shape of the draw in a batch of `rows` rows."""
        return tuple(size * rows if dim == self.dim else size for dim, size in enumerate(self.shape))

    def resembles(self, shape: Sizes, rows: int) -> bool:
        """Return whether numbers of this shape can be the same draw in a batch of `rows` rows."""
        if len(shape) != len(self.shape) or self.dim is None:
            return len(shape) == len(self.shape)
        unit = self.shape[self.dim]
        return shape[self.dim] == rows if unit == 1 else shape[self.dim] % rows == 0

    def shares_a_size(self, shape: Sizes) -> bool:
        """Return whether `shape` has the draw's size in a dim that does not hold the samples."""
        pairs = zip(self.shape, shape, strict=True)
        return any(old == new for dim, (old, new) in enumerate(pairs) if dim != self.dim)


class SampleDims:
    """The dims that hold the samples, for all random draws that were observed with two numbers of rows.

    >>> dims = SampleDims()
    >>> dims.add(3, {0: (3, 7), 1: (7, 4), 2: (1,)}, 5, {0: (5, 7), 1: (7, 4), 2: (1,)})
    >>> dims.find(0, (7, 7), 7).dim, dims.find(1, (7, 4), 7).dim, dims.find(2, (1,), 1).dim, dims.find(3, (9, 9), 1)
    (0, None, None, None)
    """

    def __init__(self) -> None:
        self._numbered: dict[int, Seen | None] = {}
        self._kinds: set[Seen] = set()

    def add(self, few: int, first: Mapping[int, Sizes], more: int, second: Mapping[int, Sizes]) -> None:
        """Add draws of two runs: `first` has their shapes by call number with `few` rows, `second` with `more` rows."""
        for call in first.keys() & second.keys():
            seen = _seen(few, first[call], more, second[call])
            if seen is not None:
                self._kinds.add(seen)
            # A call number with different draws is ambiguous.
            self._numbered[call] = seen if self._numbered.get(call, seen) == seen else None

    def find(self, call: int, shape: Sizes, rows: int) -> Seen | None:
        """Return the observed draw that matches a call number, or else a shape, for `rows` rows; None if none does."""
        numbered = self._numbered.get(call)
        if numbered is not None and numbered.at(rows) == shape:
            return numbered
        if numbered is not None and not numbered.resembles(shape, rows):
            numbered = None
        if numbered is not None and numbered.shares_a_size(shape):
            return numbered
        alike = [kind for kind in self._kinds if kind.at(rows) == shape]
        return alike[0] if len({kind.dim for kind in alike}) == 1 else numbered


def _seen(few: int, first: Sizes, more: int, second: Sizes) -> Seen | None:
    """Return the draw that has these shapes with `few` and with `more` rows; None if they are inconclusive."""
    if len(first) != len(second):
        return None
    moved = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not moved:
        return Seen(None, first)
    dim, unit = moved[0], first[moved[0]] // few
    if len(moved) > 1 or unit == 0 or (first[dim], second[dim]) != (unit * few, unit * more):
        return None
    return Seen(dim, (*first[:dim], unit, *first[dim + 1 :]))
