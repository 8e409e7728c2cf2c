"""Limits on everything that a stranger can send: sizes, numbers, times."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import SettingsError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may do to a server; bytes and seconds."""

    head: int = 32 << 10
    """Bytes of a request's line and headers."""
    body: int = 256 << 20
    """Bytes of a body, also after decompression."""
    json: int = 32 << 20
    """Bytes of a JSON text: as Python objects it takes many times that."""
    connections: int = 4096
    receive: float = 20.0
    """Seconds from a request's first byte to its last, and for an answer to be taken."""
    idle: float = 75.0
    """Seconds that a connection may be silent between requests."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise SettingsError(f"the limit {name} must be above 0", got=value, remedy=f"raise {name}")
