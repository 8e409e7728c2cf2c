"""Base class of the folders that the dashboard reads: runs, studies, and other event logs."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..core import EVENTS, fields, printable
from .log_tail import Tail

SILENT_SECONDS = 60.0
"""Seconds without an event after which a folder counts as interrupted, unless a process holds its lock."""
PARTS = b'"kind": "parts"'
"""Text in lines of events with each replica's share of every loss, which `mh.replay` needs and no page shows."""
MOST_VALUES = 100_000
"""Maximum number of values of an event that is kept as a whole, of a line of a journal, and of a run.json."""
KEPT = {
    **dict.fromkeys(("serving", "routing", "partition", "split", "servers", "ensemble"), MOST_VALUES),
    **dict.fromkeys(("plan", "profiled", "failed"), 20_000),
}
"""Kinds of events of which pages keep all values, each with the maximum number of these."""


class LogSource(ABC):
    """Base class of a folder with logs, of which it keeps the parsed contents.

    `refresh` reads a part of the new lines, `summary` returns the folder's entry in a list, and `detail` returns the
    data of its page.
    """

    kind: str
    """Kind of the folder in the dashboard's API: "run", "study" or "log"."""
    lock: str
    """Name of the file that the program which writes the folder locks."""

    def __init__(self, name: str, path: Path) -> None:
        self.id, self.path = name, path
        self.stamp = 0
        """Stamp that the library assigned to the last change; higher stamps are later changes."""
        self.began = self.changed = 0.0
        """Times of the first and of the last event, in seconds since the Unix epoch."""
        self.signature: tuple[tuple[int, int], ...] = ()
        """Modification times and sizes of the folder's files."""
        self.has_read: tuple[tuple[int, int], ...] = ()
        """The signature at the last read."""
        self.read_last = 0
        """Number of the library's last read of this folder."""
        self.is_held = False
        """Whether a process holds the folder's lock."""
        self.num_refused = 0
        """Number of lines that were JSON, but not of the expected form."""
        self.failure = ""
        """Why the folder is not read any more; empty if it is read."""
        self.parts: tuple[object, ...] = (self,)
        """The objects whose methods named `on_KIND` handle the events."""
        self._tails = self._open()

    @property
    def pending(self) -> int:
        """Number of bytes that are known to be unread."""
        return 0 if self.failure else sum(tail.pending for tail, _ in self._tails)

    @property
    def unreadable(self) -> str:
        """Text about lines and files that could not be read; empty if there are none."""
        count = self.num_refused + sum(tail.num_damaged for tail, _ in self._tails)
        lines = [f"{count} {'line' if count == 1 else 'lines'} could not be read"] if count else []
        errors = [tail.error for tail, _ in self._tails if tail.error]
        return "; ".join([*lines, *errors, *([self.failure] if self.failure else [])])

    @property
    def was_replaced(self) -> bool:
        """Whether a file was replaced or truncated, so that the folder has to be read again."""
        return any(tail.was_replaced for tail, _ in self._tails)

    @property
    def is_alive(self) -> bool:
        """Whether a process still writes the folder: its lock is held, or its last event is recent."""
        return self.is_held or time.time() - self.changed < SILENT_SECONDS

    @property
    @abstractmethod
    def state(self) -> str:
        """State of the folder as one word, such as "running"."""

    def refresh(self) -> bool:
        """Read a part of the new lines of each file, and return whether the folder's data have changed."""
        before = self.unreadable
        seen = False
        self.has_read = self.signature
        for tail, take in self._tails:
            for entry in tail.read():
                seen = True
                try:
                    take(entry)
                except Exception:
                    # An unexpected line must not prevent reading the others.
                    self.num_refused += 1
        return seen or self.unreadable != before

    def _open(self) -> list[tuple[Tail, Any]]:
        """Return the files to read, each with the function that takes its lines; by default the event log."""
        return [(Tail(self.path / EVENTS, without=(PARTS,)), self.take_event)]

    def take_event(self, entry: dict[str, Any]) -> None:
        """Process a line of the event log; raise ValueError if it is not an event."""
        if not fields.is_event(entry):
            raise ValueError("the line is not an event")
        if entry["kind"] in KEPT and num_values(entry) > KEPT[entry["kind"]]:
            raise ValueError("the event has too many values to keep them")
        # The clock of the host that writes may be ahead, but an event cannot be later than now.
        moment = min(entry["t"], time.time())
        self.began, self.changed = self.began or moment, max(self.changed, moment)
        self.take(entry)

    def take(self, entry: dict[str, Any]) -> None:
        """Pass an event to the method `on_KIND` of every part that has one."""
        for part in self.parts:
            known = getattr(part, f"on_{entry['kind']}", None)
            if known is not None:
                known(entry)

    def about(self) -> dict[str, Any]:
        """Return the fields of `summary` that folders of all kinds have."""
        return {
            "id": self.id,
            "name": printable(self.path.name),
            "state": self.state,
            "changed": self.changed,
            "pending": self.pending,
            "unreadable": self.unreadable,
        }

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """Return the data of the folder's entry in a list."""

    @abstractmethod
    def detail(self) -> dict[str, Any]:
        """Return the data of the folder's page."""


def num_values(value: Any) -> int:
    """Return the number of values in JSON data, as a measure of its memory; 64 characters of a text count as one.

    >>> num_values({"a": [1, 2], "b": "x" * 640})
    15
    """
    found, level = 0, [value]
    while level:
        lists = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        texts = [text for one in level for text in (one if isinstance(one, dict) else (one,)) if isinstance(text, str)]
        found += len(level) + sum(len(text) // 64 for text in texts)
        level = [item for items in lists for item in items]
    return found


def dump(value: Any) -> bytes:
    """Return a value as JSON that browsers can parse; NaN and infinities become null.

    >>> dump({"loss": float("nan")})
    b'{"loss": null}'
    """
    try:
        return json.dumps(value, allow_nan=False, default=str).encode()
    except ValueError:
        return json.dumps(_finite(value), default=str).encode()


def _finite(value: Any) -> Any:
    """Return JSON-ready data in which NaN and infinities are replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
