"""The event log: one append-only file of JSON lines per run, which everything that shows a run reads."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Version of the schema; it stands in every line as "v"."""

Event = dict[str, Any]

EVENTS = "events.jsonl"
"""The log's name in its folder."""


def event(kind: str, **values: Any) -> Event:
    """An event: what happened (`kind`), when (`t`, seconds since the epoch), and its values.

    >>> event("step", step=3, loss=0.5)["kind"]
    'step'
    """
    return {"v": SCHEMA, "t": round(time.time(), 6), "kind": kind, **values}


class EventLog:
    """Appends events to a file; a line is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._failed = False
        self._end_torn_line()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, entry: Mapping[str, Any]) -> None:
        """Appends one event; a full disk costs the event, not the run."""
        try:
            os.write(self._file, (json.dumps(entry, default=_plain) + "\n").encode())
        except OSError as error:
            if not self._failed:
                warnings.warn(f"events are lost, {self.path} cannot be written: {error}", RuntimeWarning, stacklevel=2)
            self._failed = True

    def close(self) -> None:
        """Closes the file; further events are an error."""
        os.close(self._file)

    def _end_torn_line(self) -> None:
        """A crash can leave half a line; it is closed so that the next event stays readable."""
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")


def keep_event(folder: str | Path, entry: Mapping[str, Any]) -> None:
    """Adds one event to the log of a folder, and lets it go again."""
    log = EventLog(Path(folder) / EVENTS)
    try:
        log.write(entry)
    finally:
        log.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a log, oldest first; torn and foreign lines are passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict) and entry.get("v") == SCHEMA:
                yield entry


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
