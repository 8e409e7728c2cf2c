"""The csv sink: `metrics.csv` in the run's folder, one line per number, append-only."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from typing import IO, Any

from ...core import open_regular
from .sink import About, NumberSink

FILE = "metrics.csv"
COLUMNS = ("time", "step", "name", "value")


class CsvSink(NumberSink):
    """Write numbers to a CSV file with one line per number, so that new metrics need no column.

    A resumed run appends to the file.
    """

    name = "csv"

    def start(self, about: About) -> None:
        path = about.folder / FILE
        is_new = not path.exists()
        file = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._file: IO[str] = os.fdopen(file, "a", newline="", encoding="utf-8")
        self._writer: Any = csv.writer(self._file)
        if is_new:
            self._writer.writerow(COLUMNS)

    def numbers(self, step: int, values: Mapping[str, float], at: float) -> None:
        self._writer.writerows((at, step, name, value) for name, value in values.items())

    def flush(self) -> None:
        self._file.flush()

    def end(self, status: str) -> None:
        self._file.close()
