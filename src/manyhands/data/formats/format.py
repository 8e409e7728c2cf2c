"""Base classes of the formats of data files, and errors that name a file and a row."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np

from ...core import DataError
from ..columns import ColumnTable
from ..order import Ids

Types = Mapping[str, str]
"""The types of the columns to read, by name; an empty string keeps the file's type."""

BLOCK_BYTES = 1 << 20
MAX_BLOCK_ROWS = 4096
KNOWN_TYPE = re.compile(r"(bool|u?int(8|16|32|64)|float(16|32|64)|str|bytes)(\[\])?")


@dataclass(frozen=True)
class FileShard:
    """The result of scanning one data file: where its blocks of rows are."""

    path: str
    num_bytes: int
    blocks: Ids
    """The first row of every block, followed by the number of rows."""
    marks: Ids
    """Offsets of the records or blocks in the file, and of the end of the last one; for Parquet, row group numbers."""
    sizes: Ids
    """Approximate bytes of memory of every block."""

    @property
    def num_rows(self) -> int:
        """Number of rows, records or samples in this file."""
        return int(self.blocks[-1])


@dataclass(frozen=True)
class Format(ABC):
    """Base class of the formats of data files, with the columns to read; None reads all columns."""

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]]
    columns: Types | None = None

    @abstractmethod
    def scan(self, path: str) -> FileShard:
        """Find the blocks of a file without decoding its rows; raise DataError for a file that cannot be read."""

    def settled(self, paths: Sequence[str]) -> Format:
        """Return the format with its column types fixed to those of the first file that has rows, for all files."""
        return self


class RecordFormat(Format):
    """Base class of formats whose records are read one by one; `FileShard.marks` has the offset of each record."""

    @abstractmethod
    def sample(self, record: bytes) -> dict[str, object]:
        """Decode the bytes of a record into a sample; raise ValueError for a damaged record."""


class TableFormat(Format):
    """Base class of formats whose columns are read a block of rows at a time."""

    @abstractmethod
    def table(self, shard: FileShard, block: int) -> ColumnTable:
        """Read the requested columns of block number `block` of a file."""


def damaged(path: str, row: int, reason: object, row_name: str = "row") -> DataError:
    """Return the error for a row that cannot be read."""
    return DataError(
        f"every {row_name} of {path} must be readable",
        got=f"{reason} at {row_name} {row}",
        remedy=f"repair the file, or omit it; {row_name}s are counted from 0",
    )


def unreadable_file(path: str, what: str, error: object) -> DataError:
    """Return the error for a file that cannot be read at all; `what` says what the file must be."""
    return DataError(
        f"{path} must be {what}", got=error, remedy="repair it, omit it, or pass format= if it has another format"
    )


def missing_columns(path: str, wanted: Types, known: list[str]) -> None:
    """Raise DataError unless all requested columns are among the columns `known` of a file."""
    missing = [name for name in wanted if name not in known]
    if missing:
        raise DataError(
            f"columns of {path} must be among {', '.join(map(repr, known))}",
            got=", ".join(map(repr, missing)),
            remedy="correct columns=",
        )


def record_blocks(marks: Ids) -> Ids:
    """Group the records at offsets `marks` into blocks of about a megabyte; return the first record of every block."""
    num_rows = len(marks) - 1
    num_bytes = int(marks[-1] - marks[0]) if num_rows else 0
    rows = min(MAX_BLOCK_ROWS, max(1, num_rows * BLOCK_BYTES // max(1, num_bytes)))
    return np.array([*range(0, num_rows, rows), num_rows], np.int64)


def check_types(columns: Types) -> None:
    """Raise DataError for an unknown column type."""
    for name, kind in columns.items():
        if kind and not KNOWN_TYPE.fullmatch(kind):
            raise DataError(
                'the type of a column must be "float32", "int64", "bool", "str", "bytes" or similar, with [] for lists',
                got=f"{kind!r} for {name!r}",
                remedy='write columns={"x": "float32", "tokens": "int64[]"}',
            )


def pyarrow(name: str = "") -> ModuleType:
    """Import pyarrow or one of its submodules; raise DataError with the install command if it is missing."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{name}" if name else "pyarrow")
    except ImportError as error:
        raise DataError(
            "reading Parquet and CSV files needs pyarrow",
            remedy="install it with pip install 'manyhands[files]'",
        ) from error


def file_size(path: str) -> int:
    """Return the size of a file in bytes; raise DataError if the file cannot be read."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise unreadable_file(path, "readable", error.strerror) from error
