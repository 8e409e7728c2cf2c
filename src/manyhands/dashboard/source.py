"""Source: a folder that the dashboard reads, and what it has understood of it so far."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ..core import EVENTS
from .tail import Tail

SILENT_SECONDS = 60.0
"""Who said nothing for so long, and did not end, was interrupted, unless a program still holds its lock."""
PARTS = b'"kind": "parts"'
"""Each replica's part of every loss, which `replay` needs and no page shows."""


class Source(ABC):
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
        self._tails = self._open()

    @property
    def pending(self) -> int:
        """Bytes that wait to be read."""
        return sum(tail.pending for tail, _ in self._tails)

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
        """Reads what is new, a slice of it; whether there was something."""
        seen = False
        self.has_read = self.signature
        for tail, take in self._tails:
            for entry in tail.read():
                moment = entry.get("t")
                if isinstance(moment, int | float):
                    self.began, self.changed = self.began or moment, max(self.changed, moment)
                try:
                    take(entry)
                except (KeyError, TypeError, ValueError, AttributeError, IndexError):
                    continue  # written by another version, or by somebody else
                finally:
                    seen = True
        return seen

    def _open(self) -> list[tuple[Tail, Any]]:
        """The files, and who takes their lines; here the events, by methods called `on_KIND`."""
        return [(Tail(self.path / EVENTS, without=(PARTS,)), self.take)]

    def take(self, entry: dict[str, Any]) -> None:
        """Takes an event."""
        known = getattr(self, f"on_{entry['kind']}", None)
        if known is not None:
            known(entry)

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What a list shows."""

    @abstractmethod
    def detail(self) -> dict[str, Any]:
        """What its own page shows."""


def read_json(path: Path) -> dict[str, Any]:
    """An object from a small file; empty where there is none, or half of one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
