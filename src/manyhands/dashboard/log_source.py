"""A folder that the dashboard reads, and what it has understood of it so far."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..core import EVENTS, fields
from .log_tail import Tail

SILENT_SECONDS = 60.0
"""Who said nothing for so long, and did not end, was interrupted, unless a program still holds its lock."""
PARTS = b'"kind": "parts"'
"""Each replica's part of every loss, which `replay` needs and no page shows."""


class LogSource(ABC):
    """One folder. `refresh` reads a slice of what is new; `summary` is its line in a list, `detail` its page."""

    kind: str
    lock: str
    """The file on which whoever writes the folder holds a lock."""

    def __init__(self, name: str, path: Path) -> None:
        self.id, self.path = name, path
        self.stamp = 0
        """The library's count when it changed last."""
        self.began = self.changed = 0.0
        """When the first and the last event happened."""
        self.signature: tuple[tuple[int, int], ...] = ()
        """When its files changed last, and their sizes."""
        self.has_read: tuple[tuple[int, int], ...] = ()
        """What the signature was at the last look."""
        self.is_held = False
        """Whether a program holds its lock."""
        self.num_refused = 0
        """Lines that were JSON, but not as readers expect them."""
        self.failure = ""
        """Why it is not read any more."""
        self._tails = self._open()

    @property
    def pending(self) -> int:
        """Bytes that wait to be read."""
        return 0 if self.failure else sum(tail.pending for tail, _ in self._tails)

    @property
    def unreadable(self) -> str:
        """What could not be read, in words; empty where everything could."""
        count = self.num_refused + sum(tail.num_damaged for tail, _ in self._tails)
        lines = [f"{count} {'line' if count == 1 else 'lines'} could not be read"] if count else []
        errors = [tail.error for tail, _ in self._tails if tail.error]
        return "; ".join([*lines, *errors, *([self.failure] if self.failure else [])])

    @property
    def was_replaced(self) -> bool:
        """Whether another file has taken the place of one: all of it has to be read anew."""
        return any(tail.was_replaced for tail, _ in self._tails)

    @property
    def is_alive(self) -> bool:
        """Whether somebody still writes it, as far as can be seen from here."""
        return self.is_held or time.time() - self.changed < SILENT_SECONDS

    @property
    @abstractmethod
    def state(self) -> str:
        """How it is doing, in a word."""

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
                    # Whatever a line of another program does to a reader, the other lines are read.
                    self.num_refused += 1
        return seen or self.unreadable != before

    def _open(self) -> list[tuple[Tail, Any]]:
        """The files, and who takes their lines; here the events, by methods called `on_KIND`."""
        return [(Tail(self.path / EVENTS, without=(PARTS,)), self.take_event)]

    def take_event(self, entry: dict[str, Any]) -> None:
        """Take an event; raise where it is not as readers expect it."""
        if not fields.is_event(entry):
            raise ValueError("not an event")
        # A clock may be wrong: what has been read has happened.
        moment = min(entry["t"], time.time())
        self.began, self.changed = self.began or moment, max(self.changed, moment)
        self.take(entry)

    def take(self, entry: dict[str, Any]) -> None:
        """Take an event that is as readers expect it."""
        known = getattr(self, f"on_{entry['kind']}", None)
        if known is not None:
            known(entry)

    def about(self) -> dict[str, Any]:
        """What all sources have in common, for lists and pages."""
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
        """What a list shows."""

    @abstractmethod
    def detail(self) -> dict[str, Any]:
        """What its own page shows."""


def printable(name: str) -> str:
    """Return a name without control characters and broken Unicode, which file systems allow and pages do not.

    >>> printable("a\\nb")
    'a\\\\x0ab'
    """
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name)


def dump(value: Any) -> bytes:
    """JSON that browsers read: numbers that it does not have become null.

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
