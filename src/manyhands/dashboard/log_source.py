"""Base class of the folders that the dashboard reads."""

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
"""Events with each replica's share of every loss, which `replay` needs and no page shows."""


class LogSource(ABC):
    """One folder. `refresh` reads a slice of new data; `summary` is its entry in a list, `detail` its page."""

    kind: str
    lock: str
    """The file that the writer of the folder locks."""

    def __init__(self, name: str, path: Path) -> None:
        self.id, self.path = name, path
        self.stamp = 0
        """The library's stamp at the last change."""
        self.began = self.changed = 0.0
        """Time of the first and of the last event."""
        self.signature: tuple[tuple[int, int], ...] = ()
        """Modification times and sizes of its files."""
        self.has_read: tuple[tuple[int, int], ...] = ()
        """The signature at the last read."""
        self.is_held = False
        """Whether a process holds its lock."""
        self.num_refused = 0
        """Number of lines that were JSON, but not of the expected form."""
        self.failure = ""
        """Why it is not read any more."""
        self.parts: tuple[object, ...] = (self,)
        """The objects whose methods named `on_KIND` handle the events."""
        self._tails = self._open()

    @property
    def pending(self) -> int:
        """Number of unread bytes."""
        return 0 if self.failure else sum(tail.pending for tail, _ in self._tails)

    @property
    def unreadable(self) -> str:
        """Description of what could not be read; empty if everything could."""
        count = self.num_refused + sum(tail.num_damaged for tail, _ in self._tails)
        lines = [f"{count} {'line' if count == 1 else 'lines'} could not be read"] if count else []
        errors = [tail.error for tail, _ in self._tails if tail.error]
        return "; ".join([*lines, *errors, *([self.failure] if self.failure else [])])

    @property
    def was_replaced(self) -> bool:
        """Whether a file was replaced, so that all of it has to be read again."""
        return any(tail.was_replaced for tail, _ in self._tails)

    @property
    def is_alive(self) -> bool:
        """Whether a process still writes the folder, judged by its lock and its last event."""
        return self.is_held or time.time() - self.changed < SILENT_SECONDS

    @property
    @abstractmethod
    def state(self) -> str:
        """Current state as one word."""

    def refresh(self) -> bool:
        """Read a slice of what is new; return whether there was something."""
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
        """Return the files to read and the handlers of their lines; here events, handled by `parts`."""
        return [(Tail(self.path / EVENTS, without=(PARTS,)), self.take_event)]

    def take_event(self, entry: dict[str, Any]) -> None:
        """Process an event; raises ValueError if it is malformed."""
        if not fields.is_event(entry):
            raise ValueError("the line is not an event")
        # The writer's clock may be ahead: an event that was read has happened.
        moment = min(entry["t"], time.time())
        self.began, self.changed = self.began or moment, max(self.changed, moment)
        self.take(entry)

    def take(self, entry: dict[str, Any]) -> None:
        """Process a well-formed event."""
        for part in self.parts:
            known = getattr(part, f"on_{entry['kind']}", None)
            if known is not None:
                known(entry)

    def about(self) -> dict[str, Any]:
        """Return the fields that all sources have in common."""
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
        """Return the data for lists."""

    @abstractmethod
    def detail(self) -> dict[str, Any]:
        """Return the data of its own page."""


def dump(value: Any) -> bytes:
    """Return JSON that browsers can parse; NaN and infinities become null.

    >>> dump({"loss": float("nan")})
    b'{"loss": null}'
    """
    try:
        return json.dumps(value, allow_nan=False, default=str).encode()
    except ValueError:
        return json.dumps(_finite(value), default=str).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
