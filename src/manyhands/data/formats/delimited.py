"""CSV files: lines of values with commas (or tabs) between them, under a line of names; a block is some lines."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...core import DataError
from ..arrow import Null, table_of
from ..columns import Table
from ..order import Ids
from .format import MAX_BLOCK_ROWS, Shard, TableFormat, damaged, file_size, missing_columns, pyarrow, unreadable_file

CHUNK = 1 << 24
_NEWLINE, _QUOTE = 10, 34
_PLACE = re.compile(r"(?:In CSV column #(\d+): )?(?:CSV parse error: )?Row #(\d+): (.*)", re.DOTALL)
_ARROW = {"float64": "float32", "double": "float32", "string": "str", "binary": "bytes"}
"""Types that a look at the first lines finds, and what they become: torch's own float where the text says no more."""


@dataclass(frozen=True)
class CsvFormat(TableFormat):
    """CSV, parsed by pyarrow; the types of its columns are those of the first file's first block."""

    name: ClassVar[str] = "csv"
    endings: ClassVar[tuple[str, ...]] = ("csv", "tsv")

    def scan(self, path: str) -> Shard:
        num_bytes = file_size(path)
        missing_columns(path, self.columns or {}, self._header(path))
        starts = _line_starts(path, num_bytes)
        num_rows = max(0, len(starts) - 1)
        first_lines = np.arange(1, num_rows + 1, MAX_BLOCK_ROWS)
        marks = np.array([*starts[first_lines], num_bytes], np.int64) if num_rows else np.array([num_bytes], np.int64)
        blocks = np.array([*range(0, num_rows, MAX_BLOCK_ROWS), num_rows], np.int64)
        return Shard(path, num_bytes, blocks, marks)

    def settled(self, path: str) -> CsvFormat:
        names = self._header(path)
        wanted = dict(self.columns) if self.columns else dict.fromkeys(names, "")
        missing_columns(path, wanted, names)
        if all(wanted.values()):
            return self
        shard = self.scan(path)
        found: dict[str, str] = {}
        if shard.num_rows:
            schema = self._parsed(shard, 0, {}).schema
            found = {field.name: _ARROW.get(str(field.type), str(field.type)) for field in schema}
        types = {name: kind or _known(found.get(name, "str")) for name, kind in wanted.items()}
        return dataclasses.replace(self, columns=types)

    def table(self, shard: Shard, block: int) -> Table:
        types = self.columns or {}
        found = self._parsed(shard, block, types)
        first = int(shard.blocks[block])
        if len(found) != shard.blocks[block + 1] - first:
            raise damaged(shard.path, first, "another number of rows than at the start", "row")
        try:
            return table_of(found, types)
        except Null as null:
            raise damaged(shard.path, first + null.row, f"no value in column {null.column!r}") from None

    def _parsed(self, shard: Shard, block: int, types: Any) -> Any:
        arrow, csv = pyarrow(), pyarrow("csv")
        names = self._header(shard.path)
        start, stop = int(shard.marks[block]), int(shard.marks[block + 1])
        kinds = {name: _arrow_type(arrow, kind) for name, kind in types.items()}
        try:
            return csv.read_csv(
                arrow.BufferReader(_bytes(shard.path, start, stop)),
                read_options=csv.ReadOptions(use_threads=False, column_names=names, block_size=max(1, stop - start)),
                parse_options=csv.ParseOptions(delimiter=_delimiter(shard.path), newlines_in_values=True),
                convert_options=csv.ConvertOptions(column_types=kinds, include_columns=list(self.columns or names)),
            )
        except arrow.ArrowInvalid as error:
            raise _misread(shard, block, names, str(error)) from error

    def _header(self, path: str) -> list[str]:
        import csv

        try:
            with open(path, encoding="utf-8-sig", newline="") as file:
                return next(csv.reader(file, delimiter=_delimiter(path)), [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise unreadable_file(path, "a CSV file", f"{type(error).__name__}: {error}") from error


def _misread(shard: Shard, block: int, names: list[str], text: str) -> DataError:
    """The error for what pyarrow could not parse: its own numbers count from the block's first line, from 1."""
    place = _PLACE.search(text)
    first = int(shard.blocks[block])
    if place is None:
        return damaged(shard.path, first, text)
    column, row, reason = place.groups()
    named = f"column {names[int(column)]!r}: {reason}" if column else reason
    return damaged(shard.path, first + int(row) - 1, named)


def _known(kind: str) -> str:
    """What a look at the first lines found, as a type; dates and the like stay texts."""
    return kind if kind in ("int64", "float32", "bool", "str", "bytes") else "str"


def _arrow_type(arrow: Any, kind: str) -> Any:
    if kind.endswith("[]"):
        raise DataError("a CSV file has one value in each place", got=repr(kind), remedy="leave the [] out")
    special = {"str": arrow.string(), "bytes": arrow.binary(), "bool": arrow.bool_()}
    return special[kind] if kind in special else arrow.from_numpy_dtype(kind)


def _delimiter(path: str) -> str:
    return "\t" if path.lower().endswith(".tsv") else ","


def _bytes(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _line_starts(path: str, num_bytes: int) -> Ids:
    """Where every line that is not empty begins, the header's first; a newline between quotes ends no line."""
    stops = np.concatenate([np.array([], np.int64), *_line_ends(path)])
    if not len(stops) or stops[-1] != num_bytes:
        stops = np.append(stops, num_bytes)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
    # Whoever writes \r\n has an empty line of two characters.
    return starts[_not_empty(path, starts, stops)]


def _not_empty(path: str, starts: Ids, stops: Ids) -> npt.NDArray[np.bool_]:
    lengths = stops - starts
    keep = lengths > 2
    with open(path, "rb") as file:
        for line in np.flatnonzero(~keep & (lengths > 0)):
            keep[line] = bool(os.pread(file.fileno(), int(lengths[line]), int(starts[line])).strip(b"\r\n"))
    return keep


def _line_ends(path: str) -> Iterator[Ids]:
    open_quote, place = 0, 0
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHUNK):
            values = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(values == _NEWLINE)
            quotes = np.flatnonzero(values == _QUOTE)
            if len(quotes) or open_quote:
                before = np.searchsorted(quotes, ends) + open_quote
                ends = ends[before % 2 == 0]
                open_quote = (open_quote + len(quotes)) % 2
            yield ends + (place + 1)
            place += len(data)
    if open_quote:
        raise unreadable_file(path, "a whole CSV file", "a quote that is never closed")
