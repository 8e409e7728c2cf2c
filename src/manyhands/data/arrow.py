"""Conversion of Arrow tables to `ColumnTable` objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .columns import Column, ColumnTable, Lists, Numbers, Objects, cast
from .order import Ids


class Null(Exception):
    """Raised for a number that is missing (null) in an Arrow table, with its row and column."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(row, column)
        self.row, self.column = row, column


def table_of(table: Any, types: Mapping[str, str]) -> ColumnTable:
    """Return an Arrow table as a `ColumnTable`, with numbers in the requested types; raise Null if one is missing."""
    return ColumnTable({name: _column(table.column(name), name, types.get(name, "")) for name in table.column_names})


def _column(chunked: Any, name: str, kind: str) -> Column:
    import pyarrow.types as is_a

    array = chunked.combine_chunks() if chunked.num_chunks != 1 else chunked.chunk(0)
    if hasattr(array, "num_chunks"):
        array = array.chunk(0)
    if is_a.is_dictionary(array.type):
        array = array.dictionary_decode()
    if _is_number(array.type):
        return Numbers(_numbers(array, name, kind))
    if is_a.is_fixed_size_list(array.type) and _is_number(array.type.value_type):
        _require_values(array, name)
        stops = np.arange(1, len(array) + 1) * array.type.list_size
        return Numbers(_inside(array, stops, name, kind).reshape(len(array), array.type.list_size))
    if (is_a.is_list(array.type) or is_a.is_large_list(array.type)) and _is_number(array.type.value_type):
        _require_values(array, name)
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = _inside(array, offsets[1:] - offsets[0], name, kind)
        return Lists(offsets[:-1] - offsets[0], np.diff(offsets), values)
    return Objects(array.to_pylist())


def _is_number(kind: Any) -> bool:
    import pyarrow.types as is_a

    return bool(is_a.is_integer(kind) or is_a.is_floating(kind) or is_a.is_boolean(kind))


def _require_values(array: Any, name: str) -> None:
    if array.null_count:
        raise Null(int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0]), name)


def _inside(array: Any, stops: Ids, name: str, kind: str) -> Any:
    """Return the numbers of all lists in an Arrow array, concatenated; `stops` has the end of each list in them."""
    try:
        return _numbers(array.flatten(), name, kind)
    except Null as null:
        raise Null(int(np.searchsorted(stops, null.row, side="right")), name) from None


def _numbers(array: Any, name: str, kind: str) -> Any:
    _require_values(array, name)
    values = array.to_numpy(zero_copy_only=False)
    wanted = kind.removesuffix("[]")
    return cast(values, wanted, name) if wanted not in ("", "str", "bytes") else values
