"""Event log: an append-only file of JSON lines for each run, study or server, from which displays read."""

from __future__ import annotations

import io
import itertools
import json
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import FileError
from .event_parts import PART_BYTES, compact_parts, next_part, parts_before, read_part
from .fields import is_event
from .files import open_regular, parse_json, read_lines, require_format
from .formatting import counted

SCHEMA = 1
"""Version of the events' schema, written to every line as "v"."""

Event = dict[str, Any]

EVENTS = "events.jsonl"
"""File name of the event log in the folder of a run, a study or a server."""


def event(kind: str, **values: Any) -> Event:
    """Create an event: what happened (`kind`), when (`t`, seconds since the epoch), and its values.

    >>> event("step", step=3, loss=0.5)["kind"]
    'step'
    """
    return {"v": SCHEMA, "t": round(time.time(), 6), "kind": kind, **values}


class EventLog:
    """Append events to a file, one JSON line each.

    If the disk is full, events are lost, but the run does not fail: there is one warning. The next event that can be
    written starts on a new line, after a notice that says how many events are missing. A log that has
    become large is continued in a new file, and its older parts are compacted in the background; see `event_parts`.
    """

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._num_lost, self._reason, self._has_warned = 0, "", False
        self._file = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(self._file).st_size
        # A crash can leave an incomplete line.
        self._is_torn = bool(size) and os.pread(self._file, 1, size - 1) != b"\n"
        self._part_bytes, self._num_bytes = part_bytes, size
        self._compaction: threading.Thread | None = None

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one event."""
        lost = [event("notice", text=f"{self._num_lost} events are missing here: {self._reason}")]
        try:
            self._append("".join(_line(one) for one in [*lost[: self._num_lost], entry]).encode())
        except OSError as error:
            self._num_lost, self._reason = self._num_lost + 1, error.strerror or str(error)
            if not self._has_warned:
                # With the time, because Python shows equal warnings only once.
                since = time.strftime("%H:%M:%S")
                warnings.warn(
                    f"events are lost from {since} on, because {self.path} cannot be written: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._has_warned = True
        else:
            self._num_lost, self._has_warned = 0, False
            if self._num_bytes > self._part_bytes:
                self._begin_part()

    def take_over(self) -> None:
        """Continue in a new file; a writer that has the old one open then appends to a part that was put aside."""
        if self._num_bytes:
            self._begin_part()

    def close(self) -> None:
        """Close the file; further events are an error."""
        os.close(self._file)
        if self._compaction is not None:
            self._compaction.join()

    def _begin_part(self) -> None:
        """Put the file aside and continue in a new one; if that fails, continue in the same for as long again."""
        self._num_bytes = 0
        try:
            os.rename(self.path, next_part(self.path))
            new = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except (OSError, FileError):
            return
        os.close(self._file)
        self._file = new
        if self._compaction is not None and self._compaction.is_alive():
            # The next compaction takes this part too.
            return
        self._compaction = threading.Thread(target=compact_parts, args=(self.path,), name="compaction of events")
        self._compaction.start()

    def _append(self, lines: bytes) -> None:
        """Write all bytes, after terminating a line that was left unfinished."""
        rest = data = b"\n" + lines if self._is_torn else lines
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        finally:
            self._num_bytes += len(data) - len(rest)
            if len(rest) < len(data):
                self._is_torn = data[len(data) - len(rest) - 1 : len(data) - len(rest)] != b"\n"


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, default=_plain) + "\n"


def keep_event(folder: str | Path, entry: Mapping[str, Any]) -> None:
    """Append one event to the log of a folder and close the log."""
    log = EventLog(Path(folder) / EVENTS)
    try:
        log.write(entry)
    finally:
        log.close()


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log and of its older parts, oldest first; a warning reports how many lines were skipped.

    A file that does not exist has no events. An unfinished last line is ignored, because a process may be writing it.

    Raises:
        FileError: The log is not a regular file, or a newer version of manyhands has written it.
    """
    if not os.path.lexists(path):
        return
    num_damaged = 0
    with os.fdopen(open_regular(path), "rb") as file:
        for line in itertools.chain(_older_lines(parts_before(path, file.fileno())), read_lines(file)):
            entry = None if line is None else parse_event(line, str(path))
            if entry is None:
                num_damaged += line is None or line.endswith(b"\n")
            elif entry.get("v") == SCHEMA:
                yield entry
    if num_damaged:
        warnings.warn(f"{counted(num_damaged, 'line')} of {path} could not be read", RuntimeWarning, stacklevel=2)


def _older_lines(parts: Sequence[Path]) -> Iterator[bytes | None]:
    """Yield the lines of older parts; None for a part that cannot be read."""
    for part in parts:
        try:
            yield from read_lines(io.BytesIO(read_part(part)))
        except (OSError, FileError):
            yield None


def parse_event(line: bytes, file: str = "the event log") -> Event | None:
    """Return the event of a line; None if the line is damaged, or is not an event as defined in `fields`.

    Raises FileError, with the name of the `file`, for an event of a newer schema.
    """
    try:
        entry = parse_json(line)
    except FileError:
        return None
    require_format(file, entry.get("v") if isinstance(entry, dict) else None, SCHEMA)
    return entry if is_event(entry) else None


def _plain(value: Any) -> Any:
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)
