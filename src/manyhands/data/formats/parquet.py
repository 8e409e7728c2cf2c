"""Parquet files: a block is a row group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrow import Null, table_of
from ..columns import ColumnTable
from .format import FileShard, TableFormat, Types, damaged, file_size, missing_columns, pyarrow, unreadable_file

_TEXTS = ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_NUMBER, _TEXT = 8, 64
"""Bytes of a value in memory; a text is a Python object."""


@dataclass(frozen=True)
class ParquetFormat(TableFormat):
    """Parquet, read by pyarrow."""

    name: ClassVar[str] = "parquet"
    endings: ClassVar[tuple[str, ...]] = ("parquet", "pq")

    def scan(self, path: str) -> FileShard:
        num_bytes = file_size(path)
        with _opened(path) as file:
            missing_columns(path, self.columns or {}, file.schema_arrow.names)
            metadata = file.metadata
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            rows = np.array([group.num_rows for group in groups], np.int64)
            sizes = np.array([_memory(group, self.columns) for group in groups], np.int64)
        blocks = np.concatenate([[0], np.cumsum(rows[rows > 0])]).astype(np.int64)
        return FileShard(path, num_bytes, blocks, np.flatnonzero(rows), sizes[rows > 0])

    def table(self, shard: FileShard, block: int) -> ColumnTable:
        names = list(self.columns) if self.columns else None
        first = int(shard.blocks[block])
        with _opened(shard.path) as file:
            try:
                found = file.read_row_group(int(shard.marks[block]), columns=names, use_threads=False)
            except Exception as error:
                raise damaged(shard.path, first, f"{type(error).__name__}: {error} in the row group", "row") from error
        try:
            return table_of(found, self.columns or {})
        except Null as null:
            raise damaged(shard.path, first + null.row, f"no value in column {null.column!r}") from None
        except ValueError as error:
            raise damaged(shard.path, first, f"{error} in the row group") from None


def _memory(group: Any, wanted: Types | None) -> int:
    """Estimate the memory of a row group's requested columns, with dictionary-encoded values expanded."""
    columns = [group.column(number) for number in range(group.num_columns)]
    return sum(
        max(column.total_uncompressed_size, column.num_values * (_TEXT if column.physical_type in _TEXTS else _NUMBER))
        for column in columns
        if not wanted or column.path_in_schema.partition(".")[0] in wanted
    )


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    arrow, parquet = pyarrow(), pyarrow("parquet")
    with arrow.memory_map(path) as memory:
        try:
            # No threads of pyarrow, because the feed may fork workers later.
            file = parquet.ParquetFile(memory, pre_buffer=False, page_checksum_verification=True)
        except Exception as error:
            raise unreadable_file(path, "a whole Parquet file", f"{type(error).__name__}: {error}") from error
        yield file
