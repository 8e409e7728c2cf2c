"""Parquet files: a block is a row group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..arrow import Null, table_of
from ..columns import Table
from .format import Shard, TableFormat, damaged, file_size, missing_columns, pyarrow, unreadable_file


@dataclass(frozen=True)
class ParquetFormat(TableFormat):
    """Parquet, read by pyarrow."""

    name: ClassVar[str] = "parquet"
    endings: ClassVar[tuple[str, ...]] = ("parquet", "pq")

    def scan(self, path: str) -> Shard:
        num_bytes = file_size(path)
        with _opened(path) as file:
            missing_columns(path, self.columns or {}, file.schema_arrow.names)
            metadata = file.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        blocks = np.cumsum([0, *[count for count in rows if count]])
        groups = np.flatnonzero(rows).astype(np.int64)
        return Shard(path, num_bytes, blocks.astype(np.int64), groups)

    def table(self, shard: Shard, block: int) -> Table:
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


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    arrow, parquet = pyarrow(), pyarrow("parquet")
    with arrow.memory_map(path) as memory:
        try:
            # No threads of its own: the feed may fork workers later.
            file = parquet.ParquetFile(memory, pre_buffer=False)
        except Exception as error:
            raise unreadable_file(path, "a whole Parquet file", f"{type(error).__name__}: {error}") from error
        yield file
