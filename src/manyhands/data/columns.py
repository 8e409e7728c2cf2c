"""Columns of a table, in memory layouts from which batches are built quickly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .collate import Fields
from .order import Ids

Array = npt.NDArray[Any]
C = TypeVar("C", bound="Column")


def cast(values: Array, kind: str, name: str) -> Array:
    """Convert the numbers of the column `name` to another type; raise ValueError if an integer type cannot hold them.

    >>> cast(np.array([1.0, 2.0]), "int64", "label")
    array([1, 2])
    """
    found = values.astype(kind, copy=False)
    if found.dtype.kind in "iu" and found.dtype != values.dtype and not np.array_equal(found, values):
        lost = values[found != values].flat[0]
        raise ValueError(f"{lost} in {name!r}, which is not a valid {kind}")
    return found


class Column(ABC):
    """Base class of columns: the values of one field for some rows of a table."""

    @abstractmethod
    def take(self: C, rows: Ids) -> C:
        """Return a column with the given rows of this one, in their order."""

    @abstractmethod
    def sample(self, row: int) -> Any:
        """Return the value of one row."""

    @classmethod
    @abstractmethod
    def joined(cls: type[C], parts: Sequence[C]) -> C:
        """Return a column with the rows of several columns."""

    @abstractmethod
    def batch(self) -> tuple[Any, Tensor | None]:
        """Return all rows as a field of a batch, and their lengths if they had to be padded, else None."""

    @abstractmethod
    def lengths(self) -> Ids:
        """Return the length of every row's value."""


class Numbers(Column):
    """A column with a number, or an array of a fixed shape, in each row."""

    def __init__(self, values: Array) -> None:
        self.values = values

    def take(self, rows: Ids) -> Numbers:
        return Numbers(self.values.take(rows, axis=0))

    def sample(self, row: int) -> Any:
        return self.values[row].copy()

    @classmethod
    def joined(cls, parts: Sequence[Numbers]) -> Numbers:
        return parts[0] if len(parts) == 1 else Numbers(np.concatenate([part.values for part in parts]))

    def lengths(self) -> Ids:
        return np.full(len(self.values), self.values.shape[1] if self.values.ndim > 1 else 1, np.int64)

    def batch(self) -> tuple[Tensor, None]:
        return torch.from_numpy(self.values if self.values.flags.writeable else self.values.copy()), None


class Lists(Column):
    """A column with a list of numbers of any length in each row.

    The list of row i is `values[starts[i]:starts[i] + sizes[i]]`.
    """

    def __init__(self, starts: Ids, sizes: Ids, values: Array) -> None:
        self.starts, self.sizes, self.values = starts, sizes, values

    def take(self, rows: Ids) -> Lists:
        return Lists(self.starts.take(rows), self.sizes.take(rows), self.values)

    def sample(self, row: int) -> Array:
        start = self.starts[row]
        return self.values[start : start + self.sizes[row]].copy()

    @classmethod
    def joined(cls, parts: Sequence[Lists]) -> Lists:
        sizes = np.concatenate([part.sizes for part in parts])
        # Only the numbers of these rows, so that others are not copied and kept in memory.
        values = np.concatenate([part._in_order() for part in parts])
        return Lists(np.cumsum(sizes) - sizes, sizes, values)

    def _in_order(self) -> Array:
        """Return the numbers of all rows, concatenated in the order of the rows."""
        shifts = self.starts - (np.cumsum(self.sizes) - self.sizes)
        return self.values.take(np.arange(int(self.sizes.sum())) + shifts.repeat(self.sizes))

    def lengths(self) -> Ids:
        return self.sizes

    def batch(self) -> tuple[Tensor, Tensor | None]:
        longest = int(self.sizes.max(initial=0))
        if (self.sizes == longest).all():
            places = self.starts[:, None] + np.arange(longest)
            return torch.from_numpy(self.values.take(places)), None
        padded = np.zeros((len(self.starts), longest), self.values.dtype)
        # Assignment through a mask fills row by row, which is the order of the numbers.
        padded[np.arange(longest) < self.sizes[:, None]] = self._in_order()
        return torch.from_numpy(padded), torch.from_numpy(self.sizes.copy())


class Objects(Column):
    """A column of values that are not numbers: strings, bytes, nested objects."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values

    def take(self, rows: Ids) -> Objects:
        return Objects([self.values[row] for row in rows.tolist()])

    def sample(self, row: int) -> Any:
        return self.values[row]

    @classmethod
    def joined(cls, parts: Sequence[Objects]) -> Objects:
        return parts[0] if len(parts) == 1 else Objects([value for part in parts for value in part.values])

    def lengths(self) -> Ids:
        return np.array([len(value) for value in self.values], np.int64)

    def batch(self) -> tuple[list[Any], None]:
        return list(self.values), None


class ColumnTable:
    """A table: columns of the same length, by name.

    >>> table = ColumnTable({"x": Numbers(np.arange(4.0)), "name": Objects(["a", "b", "c", "d"])})
    >>> table.take(np.array([3, 1])).batch()
    {'x': tensor([3., 1.], dtype=torch.float64), 'name': ['d', 'b']}
    >>> table.sample(2)["name"]
    'c'
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns

    def take(self, rows: Ids) -> ColumnTable:
        """Return a table with the given rows of this one, in their order."""
        return ColumnTable({name: column.take(rows) for name, column in self.columns.items()})

    def sample(self, row: int) -> dict[str, Any]:
        """Return one row as a dict of its values by column."""
        return {name: column.sample(row) for name, column in self.columns.items()}

    @staticmethod
    def joined(parts: Sequence[ColumnTable]) -> ColumnTable:
        """Return a table with the rows of several tables that have the same columns."""
        first = parts[0].columns
        return ColumnTable({name: type(first[name]).joined([part.columns[name] for part in parts]) for name in first})

    def batch(self) -> Fields:
        """Return all rows as one batch, with padding where lists differ in length."""
        fields, padded = {}, {}
        for name, column in self.columns.items():
            fields[name], lengths = column.batch()
            if lengths is not None:
                padded[name] = lengths
        return Fields(fields, padded)
