"""CSV files: lines of values separated by commas or tabs, after a header line of names; a block is some lines."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ...core import DataError
from ..arrow import Null, table_of
from ..columns import ColumnTable
from ..order import Ids
from .format import (
    BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    FileShard,
    TableFormat,
    damaged,
    file_size,
    missing_columns,
    pyarrow,
    unreadable_file,
)

CHUNK = 1 << 24
MAX_ROW_BYTES = 2**31 - 1
"""Maximum bytes that pyarrow parses at once."""
_NEWLINE, _RETURN, _QUOTE, _MARK = 10, 13, 34, b"\xef\xbb\xbf"
_PLACE = re.compile(r"(?:In CSV column #(\d+): )?(?:CSV parse error: )?Row #(\d+): (.*)", re.DOTALL)
_ARROW = {"float64": "float32", "double": "float32", "string": "str", "binary": "bytes"}
"""Column types by the name of the type that pyarrow infers, where they differ: floats are torch's default dtype."""


@dataclass(frozen=True)
class CsvFormat(TableFormat):
    """CSV files, parsed by pyarrow; column types that are not given are those of the first block that has rows."""

    name: ClassVar[str] = "csv"
    endings: ClassVar[tuple[str, ...]] = ("csv", "tsv")

    def scan(self, path: str) -> FileShard:
        num_bytes = file_size(path)
        missing_columns(path, self.columns or {}, self._header(path))
        starts = _line_starts(path, num_bytes)
        rows = np.append(starts[1:], num_bytes)
        too_long = np.flatnonzero(np.diff(rows) > MAX_ROW_BYTES)
        if len(too_long):
            raise damaged(path, int(too_long[0]), f"more than {MAX_ROW_BYTES} bytes")
        blocks = np.array([*_block_starts(rows), len(rows) - 1], np.int64)
        return FileShard(path, num_bytes, blocks, rows[blocks], np.diff(rows[blocks]))

    def settled(self, paths: Sequence[str]) -> CsvFormat:
        names = self._header(paths[0])
        wanted = dict(self.columns) if self.columns else dict.fromkeys(names, "")
        missing_columns(paths[0], wanted, names)
        if all(wanted.values()):
            return self
        # A file may have only a header, which does not show the types.
        shard = next((shard for shard in map(self.scan, paths) if shard.num_rows), None)
        found: dict[str, str] = {}
        if shard is not None:
            schema = self._parsed(shard, 0, {}).schema
            found = {field.name: _ARROW.get(str(field.type), str(field.type)) for field in schema}
        types = {name: kind or _known(found.get(name, "str")) for name, kind in wanted.items()}
        return dataclasses.replace(self, columns=types)

    def table(self, shard: FileShard, block: int) -> ColumnTable:
        types = self.columns or {}
        found = self._parsed(shard, block, types)
        first = int(shard.blocks[block])
        if len(found) != shard.blocks[block + 1] - first:
            raise damaged(shard.path, first, "another number of rows than at the start", "row")
        try:
            return table_of(found, types)
        except Null as null:
            raise damaged(shard.path, first + null.row, f"no value in column {null.column!r}") from None

    def _parsed(self, shard: FileShard, block: int, types: Any) -> Any:
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
                names = next(filter(None, csv.reader(file, delimiter=_delimiter(path))), [])
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise unreadable_file(path, "a CSV file", f"{type(error).__name__}: {error}") from error
        if not names:
            raise unreadable_file(path, "a CSV file with a line of names", "no line at all")
        twice = [name for name in self.columns or names if names.count(name) > 1]
        if twice:
            raise unreadable_file(path, "a CSV file whose columns have different names", f"{twice[0]!r} twice")
        return names


def _misread(shard: FileShard, block: int, names: list[str], text: str) -> DataError:
    """Return the error for a row of a block that pyarrow could not parse; pyarrow counts rows of the block from 1."""
    place = _PLACE.search(text)
    first = int(shard.blocks[block])
    if place is None:
        return damaged(shard.path, first, text)
    column, row, reason = place.groups()
    named = f"column {names[int(column)]!r}: {reason}" if column else reason
    return damaged(shard.path, first + int(row) - 1, named)


def _known(kind: str) -> str:
    """Return an inferred column type if it is supported, else "str": dates, for example, stay text."""
    return kind if kind in ("int64", "float32", "bool", "str", "bytes") else "str"


def _arrow_type(arrow: Any, kind: str) -> Any:
    if kind.endswith("[]"):
        raise DataError("a CSV column cannot contain lists", got=repr(kind), remedy="omit the []")
    special = {"str": arrow.string(), "bytes": arrow.binary(), "bool": arrow.bool_()}
    return special[kind] if kind in special else arrow.from_numpy_dtype(kind)


def _delimiter(path: str) -> str:
    return "\t" if path.lower().endswith(".tsv") else ","


def _block_starts(rows: Ids) -> Iterator[int]:
    """Yield the first row of every block, which has at most MAX_BLOCK_ROWS rows and about a megabyte."""
    first, num_rows = 0, len(rows) - 1
    while first < num_rows:
        yield first
        within = int(np.searchsorted(rows, rows[first] + BLOCK_BYTES, side="right")) - 1
        first = max(first + 1, min(first + MAX_BLOCK_ROWS, within))


def _bytes(path: str, start: int, stop: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(stop - start)


def _line_starts(path: str, num_bytes: int) -> Ids:
    """Return the offset of every line that is not empty, header included; a newline within quotes ends no line."""
    stops = np.concatenate([np.array([], np.int64), *_line_ends(path)])
    if not len(stops) or stops[-1] != num_bytes:
        stops = np.append(stops, num_bytes)
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
    # With \r\n line ends an empty line has two characters.
    return starts[_not_empty(path, starts, stops)]


def _not_empty(path: str, starts: Ids, stops: Ids) -> npt.NDArray[np.bool_]:
    lengths = stops - starts
    keep = lengths > 2
    with open(path, "rb") as file:
        for line in np.flatnonzero(~keep & (lengths > 0)):
            keep[line] = bool(os.pread(file.fileno(), int(lengths[line]), int(starts[line])).strip(b"\r\n"))
    return keep


def _line_ends(path: str) -> Iterator[Ids]:
    """Yield the offsets after line ends. A quote opens a quoted value only at the start of a value, as in pyarrow."""
    is_open, before = False, _NEWLINE
    borders = np.isin(np.arange(256), [_NEWLINE, _RETURN, ord(_delimiter(path))])
    for place, values in _chunks(path):
        ends = np.flatnonzero(values == _NEWLINE)
        lone = _lone_returns(values)
        places, opens = _quoted(values, before, borders, is_open)
        if len(places) or is_open:
            states = np.concatenate([[is_open], opens])
            ends, lone = (found[~states[np.searchsorted(places, found)]] for found in (ends, lone))
            is_open = bool(states[-1])
        if len(lone):
            got = f"\\r alone at byte {place + int(lone[0])}"
            raise unreadable_file(path, "a CSV file whose lines end with \\n or \\r\\n", got)
        before = int(values[-1])
        yield ends + (place + 1)
    if is_open:
        raise unreadable_file(path, "a whole CSV file", "a quote that is never closed")


def _chunks(path: str) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield a file in chunks with their offsets, without a byte order mark.

    No chunk ends between two quotes, or between \\r and \\n.
    """
    with open(path, "rb") as file:
        place = len(_MARK) if file.read(len(_MARK)) == _MARK else 0
        file.seek(place)
        while data := file.read(CHUNK):
            while data[-1] in (_QUOTE, _RETURN) and (more := file.read(1)):
                data += more
            yield place, np.frombuffer(data, np.uint8)
            place += len(data)


def _lone_returns(values: npt.NDArray[np.uint8]) -> Ids:
    """Return the positions of \\r without \\n after it in a chunk, except the last byte."""
    returns: Ids = np.flatnonzero(values[:-1] == _RETURN)
    lone: Ids = returns[values[returns + 1] != _NEWLINE]
    return lone


def _quoted(
    values: npt.NDArray[np.uint8], before: int, borders: npt.NDArray[np.bool_], is_open: bool
) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return the positions of quotes in a chunk that may open or close a value, and whether one is open after each.

    Args:
        values: The bytes of the chunk.
        before: The byte before the chunk.
        borders: For every byte, whether a value may start after it: after a line end or a delimiter.
        is_open: Whether the chunk starts within a quoted value.
    """
    quotes = np.flatnonzero(values == _QUOTE)
    firsts = np.flatnonzero(np.diff(quotes, prepend=-2) > 1)
    # Two quotes inside a value are an escaped quote, so only runs of odd length open or close a value.
    is_odd = np.diff(np.append(firsts, len(quotes))) % 2 == 1
    places = quotes[firsts][is_odd]
    starts_value = borders[np.where(places > 0, values[places - 1], before)]
    # At the start of a value a quote toggles between open and closed; elsewhere it can only close.
    turns = np.cumsum(starts_value) + is_open
    at_last_close = np.maximum.accumulate(np.where(starts_value, 0, turns))
    opens: npt.NDArray[np.bool_] = np.equal((turns - at_last_close) % 2, 1)
    return places, opens
