"""Parquet files: a block is a row group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...core import DataError
from ..arrow import Null, table_of
from ..columns import ColumnTable
from .format import FileShard, TableFormat, Types, damaged, file_size, missing_columns, pyarrow, unreadable_file

_TEXTS = ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_NUMBER, _TEXT = 8, 64
"""Estimated bytes of a number and of a string in memory; a string is a Python object."""
MAX_GROUP_BYTES = 4 << 30
"""Maximum bytes of a row group's requested columns in memory; row groups usually have at most 1 GiB."""
_BATCH_BYTES = 1 << 28
"""Maximum bytes of strings with shared prefixes that are decoded between two checks of their size."""


@dataclass(frozen=True)
class ParquetFormat(TableFormat):
    """Parquet files, read by pyarrow; a block is a row group."""

    name: ClassVar[str] = "parquet"
    endings: ClassVar[tuple[str, ...]] = ("parquet", "pq")

    def scan(self, path: str) -> FileShard:
        num_bytes = file_size(path)
        with _opened(path) as file:
            missing_columns(path, self.columns or {}, file.schema_arrow.names)
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            rows = np.array([group.num_rows for group in groups], np.int64)
            sizes = np.array([_memory(group, file.schema, self.columns) for group in groups], np.float64)
        if (largest := max(sizes, default=0.0)) > MAX_GROUP_BYTES:
            raise _too_large(path, f"{largest:.0f} bytes by its metadata")
        if (rows < 0).any():
            raise unreadable_file(path, "a whole Parquet file", "a row group with a negative number of rows")
        blocks = np.concatenate([[0], np.cumsum(rows[rows > 0])]).astype(np.int64)
        return FileShard(path, num_bytes, blocks, np.flatnonzero(rows), sizes[rows > 0].astype(np.int64))

    def table(self, shard: FileShard, block: int) -> ColumnTable:
        names = list(self.columns) if self.columns else None
        first = int(shard.blocks[block])
        number = int(shard.marks[block])
        with _opened(shard.path, number) as file:
            try:
                found = _read(file, number, names, shard.path)
            except DataError:
                raise
            except Exception as error:
                raise damaged(shard.path, first, f"{type(error).__name__}: {error} in the row group", "row") from error
        num_bytes = sum(_decoded_bytes(chunk) for column in found.columns for chunk in column.chunks)
        if num_bytes > MAX_GROUP_BYTES:
            raise _too_large(shard.path, f"{num_bytes} bytes of texts")
        try:
            return table_of(found, self.columns or {})
        except Null as null:
            raise damaged(shard.path, first + null.row, f"no value in column {null.column!r}") from None
        except ValueError as error:
            raise damaged(shard.path, first, f"{error} in the row group") from None


def _too_large(path: str, size: str) -> DataError:
    return DataError(
        f"a row group of {path} must have at most {MAX_GROUP_BYTES} bytes in memory",
        got=size,
        remedy="write the file with smaller row groups, or pass columns= with fewer columns",
    )


def _memory(group: Any, schema: Any, wanted: Types | None) -> float:
    """Estimate the bytes of a row group's requested columns in memory; dictionary-encoded numbers count per row."""
    total = 0.0
    for number in range(group.num_columns):
        column = group.column(number)
        if not wanted or column.path_in_schema.partition(".")[0] in wanted:
            value = _TEXT + max(0, schema.column(number).length) if column.physical_type in _TEXTS else _NUMBER
            total += max(float(column.total_uncompressed_size), float(column.num_values) * value)
    return total


def _decoded_bytes(array: Any) -> int:
    """Return the bytes that the dictionary-encoded strings of an array take when each row gets its own copy."""
    compute, kinds = pyarrow("compute"), pyarrow("types")
    if kinds.is_list(array.type) or kinds.is_large_list(array.type) or kinds.is_fixed_size_list(array.type):
        return _decoded_bytes(array.flatten())
    if kinds.is_struct(array.type):
        return sum(map(_decoded_bytes, array.flatten()))
    if not kinds.is_dictionary(array.type):
        return 0
    lengths = compute.binary_length(array.dictionary).cast("int64")
    return int(compute.sum(lengths.take(array.indices)).as_py() or 0)


@contextmanager
def _opened(path: str, group: int | None = None) -> Iterator[Any]:
    """Open a Parquet file. If `group` is a row group, strings that it stores as dictionaries are read as dictionaries.

    A string in a dictionary is stored once and may occur in any number of rows, so that no size in the metadata limits
    the memory of the rows. Dictionaries are expanded only after that memory was computed.
    """
    arrow, parquet = pyarrow(), pyarrow("parquet")
    with arrow.memory_map(path) as memory:
        try:
            # No threads of pyarrow, because the feed may fork workers later.
            options = {"pre_buffer": False, "page_checksum_verification": True}
            file = parquet.ParquetFile(memory, **options)
            if group is not None and (names := _dictionaries(file.metadata.row_group(group))):
                file = parquet.ParquetFile(memory, metadata=file.metadata, read_dictionary=names, **options)
        except Exception as error:
            raise unreadable_file(path, "a whole Parquet file", f"{type(error).__name__}: {error}") from error
        yield file


def _dictionaries(group: Any) -> list[str]:
    """Return the names of the string columns in which a string of a dictionary may be repeated too often."""
    return [
        column.path_in_schema
        for column in _repeating(group)
        if column.has_dictionary_page and not _has_prefixes(column)
    ]


def _repeating(group: Any) -> list[Any]:
    """Return the string columns that would take too much memory if every value were as long as all stored bytes."""
    columns = (group.column(number) for number in range(group.num_columns))
    return [
        column
        for column in columns
        if column.physical_type == "BYTE_ARRAY" and column.num_values * column.total_uncompressed_size > MAX_GROUP_BYTES
    ]


def _has_prefixes(column: Any) -> bool:
    """Return whether strings are stored without the prefixes that they share with the string before.

    pyarrow does not read such columns as dictionaries.
    """
    return "DELTA_BYTE_ARRAY" in column.encodings


def _read(file: Any, number: int, names: list[str] | None, path: str) -> Any:
    """Read a row group; raise DataError if strings that share prefixes take too much memory."""
    group = file.metadata.row_group(number)
    longest = max((column.total_uncompressed_size for column in _repeating(group) if _has_prefixes(column)), default=0)
    if not longest:
        return file.read_row_group(number, columns=names, use_threads=False)
    batches, num_bytes = [], 0
    rows = max(1, _BATCH_BYTES // longest)
    for batch in file.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
        batches.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > MAX_GROUP_BYTES:
            raise _too_large(path, f"more than {num_bytes} bytes")
    return pyarrow().Table.from_batches(batches)
