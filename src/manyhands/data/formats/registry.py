"""The supported formats of data files, and the choice of a file's format by its name."""

from __future__ import annotations

from pathlib import Path

from ...core import DataError
from .delimited import CsvFormat
from .format import Format, Types
from .parquet import ParquetFormat
from .tar import TarFormat
from .tfrecord import TFRecordFormat

FORMATS: dict[str, type[Format]] = {kind.name: kind for kind in (ParquetFormat, CsvFormat, TFRecordFormat, TarFormat)}
"""The formats by name. A new format is one file and one entry here."""
PACKED = ("gz", "bz2", "xz", "zst", "zip")


def format_of(path: str, name: str | None, columns: Types | None) -> Format:
    """Return the format called `name`; if it is None, the format of files with the extension of `path`."""
    if name is not None:
        if name not in FORMATS:
            raise DataError(f"format must be one of {', '.join(FORMATS)}", got=repr(name), remedy="choose one of them")
        return FORMATS[name](columns)
    # Names such as train.tfrecord-00000-of-00016 have a suffix after the extension.
    endings = [part.partition("-")[0].lower() for part in Path(path).name.split(".")[1:]]
    if endings and endings[-1] in PACKED:
        raise DataError(
            "data files must not be compressed as a whole, because they are read from any position",
            got=path,
            remedy="decompress it; Parquet columns and the samples in a tar file may be compressed",
        )
    found = next((kind for kind in FORMATS.values() if set(endings) & set(kind.endings)), None)
    if found is None:
        known = ", ".join(f".{ending}" for kind in FORMATS.values() for ending in kind.endings)
        raise DataError(
            f"names of data files must end in {known}",
            got=path,
            remedy='rename it, or pass its format, for example format="parquet"',
        )
    return found(columns)
