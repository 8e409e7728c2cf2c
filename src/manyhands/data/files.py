"""Data files: many files are read as one dataset, in one global order that can start at any position."""

from __future__ import annotations

import glob
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..core import DataError
from .batch import SampleMarker
from .collate import collate as default_collate
from .columns import ColumnTable
from .formats import (
    FileShard,
    Format,
    RecordFormat,
    TableFormat,
    check_types,
    damaged,
    format_of,
    unreadable_file,
)
from .order import BlockOrder, Ids, Order
from .randomness import SampleRandomness, mix
from .source import Collate, IndexedSource, collated

MIXED_ROWS = 16_384
"""Number of rows that are shuffled with each other, unless the user sets it."""
MIXED_BLOCKS = 4
"""Minimum number of blocks that are shuffled with each other, so that a file sorted by class is mixed."""
MIXED_BYTES = 1 << 28
"""Maximum bytes of the rows that are shuffled with each other, unless the user sets their number.

Every process keeps them in memory.
"""
SCANNERS = 8
OPEN_FILES = 64


@dataclass(frozen=True)
class Index:
    """The result of a scan of all files: their rows and blocks, and the format with the column types of all files."""

    format: Format
    shards: tuple[FileShard, ...]


@dataclass(frozen=True)
class Files:
    """Data files and how to read them; created by `mh.data.files`."""

    paths: tuple[str, ...]
    format: Format
    decode: Callable[[dict[str, Any]], Any] | None = None
    window: int | None = None
    _found: list[Index] = field(default_factory=list, repr=False, compare=False)
    """The index after the scan, else empty; it is sent with the task, so that no rank scans again."""

    def index(self) -> Index:
        """Scan all files at the first call, and return the result."""
        if not self._found:
            settled = self.format.settled(self.paths)
            with ThreadPoolExecutor(min(SCANNERS, len(self.paths))) as pool:
                self._found.append(Index(settled, tuple(pool.map(settled.scan, self.paths))))
        return self._found[0]


def files(
    paths: str | Path | Iterable[str | Path],
    *,
    format: str | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    decode: Callable[[dict[str, Any]], Any] | None = None,
    window: int | None = None,
) -> Files:
    """Describe data files for `Task.data`: Parquet, CSV, TFRecord, or tar files of samples.

    Args:
        paths: A path, a pattern such as "train-*.parquet", or several of them. Each file is read once; files are
            sorted by name.
        format: "parquet", "csv", "tfrecord" or "tar"; by default found from the file extensions.
        columns: Names of the columns to read, or their types by name: "float32", "int64", "bool", "str", "bytes", and
            for lists in TFRecord files for example "int64[]". By default all columns are read, the types of a CSV file
            are inferred from its first lines (numbers with a decimal point are float32), and the features of a TFRecord
            file are lists.
        decode: Function that is called with every sample, a dict, and returns the sample to use. Its random draws
            depend on the seed, the epoch and the sample alone.
        window: Number of rows that are shuffled with each other, 16,384 by default; blocks of rows are shuffled over
            all files. About two windows of Parquet and CSV files are kept in memory. By default, row groups of hundreds
            of megabytes are therefore shuffled only within themselves: write smaller ones if a file is sorted.

    In a tar file, members with the same name up to the first dot are one sample:
    `{"__key__": name, extension: content, ...}`. A truncated file, a wrong checksum or a row that cannot be parsed
    stops the run with an error that names the file and the row.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name, rows in {"a": "1,2.5\\n2,3.5\\n", "b": "3,4.5\\n"}.items():
    ...     _ = (folder / f"{name}.csv").write_text("number,size\\n" + rows)
    >>> from manyhands.data import Cursor, Feed, as_source
    >>> feed = Feed(as_source(files(folder / "*.csv")), batch_size=3, shuffle=False)
    >>> next(feed.epoch(Cursor())).data
    {'number': tensor([1, 2, 3]), 'size': tensor([2.5000, 3.5000, 4.5000])}
    """
    found = _expanded([paths] if isinstance(paths, str | Path) else list(paths))
    types = dict(columns) if isinstance(columns, Mapping) else None if columns is None else dict.fromkeys(columns, "")
    check_types(types or {})
    if window is not None and (not isinstance(window, int) or window < 1):
        raise DataError("window must be at least 1 row", got=repr(window), remedy="pass for example window=10000")
    formats = {path: format_of(path, format, types) for path in found}
    if len({kind.name for kind in formats.values()}) > 1:
        raise DataError(
            "the files of one dataset must have one format",
            got=", ".join(sorted({kind.name for kind in formats.values()})),
            remedy="pass a narrower pattern, or format=",
        )
    return Files(tuple(found), formats[found[0]], decode, window)


def _expanded(patterns: Sequence[str | Path]) -> list[str]:
    found: set[str] = set()
    for pattern in map(str, patterns):
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not matches:
            raise DataError("data files must exist", got=pattern, remedy="correct the path or the pattern")
        found.update(matches)
    folder = next((path for path in found if os.path.isdir(path)), None)
    if folder is not None:
        raise DataError("paths must name files", got=f"the folder {folder}", remedy=f"pass '{folder}/*.parquet'")
    # Opening a FIFO would wait for its writer.
    special = next((path for path in sorted(found) if not os.path.isfile(path)), None)
    if special is not None:
        raise DataError(
            "data files must be regular files",
            got=f"{special}, which is a FIFO, a device, a socket or a broken link",
            remedy="pass a narrower pattern",
        )
    if not found:
        raise DataError("at least one data file is required", got="an empty list", remedy="pass paths or a pattern")
    return sorted(found)


def files_source(data: Files, collate: Collate | None) -> IndexedSource:
    """Return the source that reads the described files."""
    return RecordSource(data, collate) if isinstance(data.format, RecordFormat) else TableSource(data, collate)


class FileSource(IndexedSource):
    """Base class of the sources that read files. The id of a row is its number over all files, sorted by name."""

    def __init__(self, data: Files, collate: Collate | None) -> None:
        index = data.index()
        self.name = f"{len(index.shards)} {index.format.name} files" if len(index.shards) > 1 else data.paths[0]
        self.max_workers = 64
        self._shards, self._decode = index.shards, data.decode
        self._collate = default_collate if collate is None else SampleMarker(collate)
        self._randomness = SampleRandomness()
        first_rows = np.cumsum([0, *(shard.num_rows for shard in index.shards)])
        self._firsts: list[int] = first_rows.tolist()
        self.size = self._firsts[-1]
        shifted = [shard.blocks[:-1] + first for shard, first in zip(index.shards, first_rows, strict=False)]
        self._starts = np.concatenate([*shifted, [self.size]]).astype(np.int64)
        self._first_blocks = np.cumsum([0, *(len(shard.blocks) - 1 for shard in index.shards)])
        self._per_window = self._blocks_per_window(data.window)

    def order(self, seed: int, epoch: int, shuffle: bool) -> Any:
        if not shuffle or not self.size:
            return Order(self.size, seed, epoch, False)
        return BlockOrder(self._starts, self._per_window, seed, epoch)

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        return partial(self._fetch_reproducibly, mix(seed, epoch))

    def fetch(self, ids: Ids) -> Any:
        return collated(self.samples(ids.tolist()), self._collate, self.name)

    def _fetch_reproducibly(self, key: int, ids: Ids) -> Any:
        samples = self._randomness.read(key, ids.tolist(), self.samples)
        return collated(samples, self._collate, self.name)

    def _decoded(self, i: int, row: dict[str, Any]) -> Any:
        if self._decode is None:
            return row
        try:
            return self._decode(row)
        except Exception as error:
            shard, number = self._place(i)
            name = getattr(self._decode, "__name__", "decode")
            raise damaged(shard.path, number, f"{type(error).__name__}: {error} in {name}") from error

    def _place(self, i: int) -> tuple[FileShard, int]:
        """Return the file that contains row `i` of all files, and the number of the row in it."""
        which = bisect_right(self._firsts, i) - 1
        return self._shards[which], i - self._firsts[which]

    def _blocks_per_window(self, window: int | None) -> int:
        mean = self.size / max(1, len(self._starts) - 1)
        if window is None:
            return max(MIXED_BLOCKS, round(MIXED_ROWS / max(1.0, mean)))
        return max(1, round(window / max(1.0, mean)))


class RecordSource(FileSource):
    """Source of files with records, such as TFRecord and tar files; each record is read separately.

    The operating system caches the bytes around it.
    """

    def __init__(self, data: Files, collate: Collate | None) -> None:
        super().__init__(data, collate)
        form = data.index().format
        assert isinstance(form, RecordFormat)
        self._format, self._handles = form, Handles()

    def samples(self, ids: Sequence[int]) -> list[Any]:
        # One by one, so that the buffer of a record is freed before the next one is read.
        return [self._decoded(i, self._record(i)) for i in ids]

    def _record(self, i: int) -> dict[str, Any]:
        shard, row = self._place(i)
        start, stop = shard.marks[row : row + 2].tolist()
        try:
            return self._format.sample(self._handles.read(shard, start, stop - start))
        except DataError:
            raise
        except ValueError as error:
            raise damaged(shard.path, row, error, "record") from error


class TableSource(FileSource):
    """Source of files with columns, such as Parquet and CSV files, which are read a block of rows at a time.

    The blocks of about two windows (rows that are shuffled with each other) are cached, or of one if blocks are large.
    """

    def __init__(self, data: Files, collate: Collate | None) -> None:
        super().__init__(data, collate)
        form = data.index().format
        assert isinstance(form, TableFormat)
        self._format = form
        self._tables: OrderedDict[int, ColumnTable] = OrderedDict()
        self._kept = 0
        """Bytes of the cached blocks."""
        self._is_plain = data.decode is None and collate is None
        # Without user code reading is fast, and a thread can read instead of processes.
        self.max_workers = 0 if self._is_plain else 64

    def reader(self, seed: int, epoch: int) -> Callable[[Ids], Any]:
        return self.fetch if self._is_plain else super().reader(seed, epoch)

    def fetch(self, ids: Ids) -> Any:
        return self._taken(ids).batch() if self._is_plain else super().fetch(ids)

    def lengths(self, length: str | Callable[[Any], int]) -> Ids:
        if not isinstance(length, str):
            return super().lengths(length)
        form = replace(self._format, columns={length: (self._format.columns or {}).get(length, "")})
        blocks = [(shard, block) for shard in self._shards for block in range(len(shard.blocks) - 1)]
        # Reads one column, a block at a time, because bucketing needs only a small part of a large table.
        return np.concatenate([form.table(shard, block).columns[length].lengths() for shard, block in blocks])

    def samples(self, ids: Sequence[int]) -> list[Any]:
        table = self._taken(np.asarray(ids, np.int64))
        return [self._decoded(i, table.sample(row)) for row, i in enumerate(ids)]

    def _taken(self, ids: Ids) -> ColumnTable:
        """Return the rows with these ids, in the order of the ids."""
        blocks = np.searchsorted(self._starts, ids, side="right") - 1
        by_block = np.argsort(blocks, kind="stable")
        bounds = np.flatnonzero(np.diff(blocks[by_block])) + 1
        parts = [
            self._table(int(blocks[some[0]])).take(ids[some] - self._starts[blocks[some[0]]])
            for some in np.split(by_block, bounds)
        ]
        return ColumnTable.joined(parts).take(np.argsort(by_block, kind="stable"))

    def _table(self, block: int) -> ColumnTable:
        found = self._tables.pop(block, None)
        is_new = found is None
        if found is None:
            found = self._read(block)
        self._tables[block] = found
        self._kept += self._sizes[block] if is_new else 0
        while len(self._tables) > 1 and self._kept > self._cache_bytes:
            self._kept -= self._sizes[self._tables.popitem(last=False)[0]]
        return found

    def _blocks_per_window(self, window: int | None) -> int:
        sizes = np.concatenate([shard.sizes for shard in self._shards])
        self._sizes: list[int] = sizes.tolist()
        largest = max(1, max(self._sizes, default=1))
        asked = super()._blocks_per_window(window)
        # Depends only on the files and not on this machine's memory, so that the order is the same everywhere.
        found = asked if window is not None else max(1, min(asked, MIXED_BYTES // largest))
        self._cache_bytes = max(min(2 * found * largest, 2 * MIXED_BYTES), found * largest)
        return found

    def _read(self, block: int) -> ColumnTable:
        which = int(np.searchsorted(self._first_blocks, block, side="right")) - 1
        shard = self._shards[which]
        now = os.stat(shard.path).st_size if os.path.exists(shard.path) else None
        if now != shard.num_bytes:
            raise changed(shard, now)
        return self._format.table(shard, block - int(self._first_blocks[which]))


class Handles:
    """A cache of open files. Forked workers may use them too, because reads do not depend on the file position."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, shard: FileShard, start: int, size: int) -> bytes:
        """Return `size` bytes of a file from offset `start` on; raise DataError if the file has changed."""
        handle = self._open.get(shard.path)
        data = os.pread(self._opened(shard) if handle is None else handle, size, start)
        if len(data) < size:
            raise changed(shard, start + len(data))
        return data

    def _opened(self, shard: FileShard) -> int:
        if len(self._open) >= OPEN_FILES:
            os.close(self._open.pop(next(iter(self._open))))
        try:
            found = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable_file(shard.path, "readable", error.strerror) from error
        if (now := os.fstat(found).st_size) != shard.num_bytes:
            os.close(found)
            raise changed(shard, now)
        self._open[shard.path] = found
        return found

    def __del__(self) -> None:
        for handle in self._open.values():
            os.close(handle)


def changed(shard: FileShard, num_bytes: int | None) -> DataError:
    """Return the error for a file that has changed since the scan."""
    return DataError(
        f"{shard.path} must not change while it is read",
        got="a deleted file" if num_bytes is None else f"{num_bytes} bytes instead of {shard.num_bytes}",
        remedy="start again, so that the file is scanned again",
    )
