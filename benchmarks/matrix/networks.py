"""All networks of the matrix by name."""

from __future__ import annotations

from collections.abc import Mapping

from .classics import CLASSICS
from .network import Entry

NETWORKS: Mapping[str, Entry] = {**CLASSICS}


def find(name: str) -> Entry:
    """Return a network by its full name."""
    return NETWORKS[name]
