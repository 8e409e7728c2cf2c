"""Formats of data files: how a fast scan finds the blocks of a file, and how rows are read."""

from .format import FileShard, Format, RecordFormat, TableFormat, check_types, damaged, unreadable_file
from .registry import format_of

__all__ = [
    "Format",
    "RecordFormat",
    "TableFormat",
    "FileShard",
    "format_of",
    "check_types",
    "damaged",
    "unreadable_file",
]
