"""Finding: what one look at the machine came to."""

from __future__ import annotations

from dataclasses import dataclass

OK, SLOW, BROKEN = "ok", "slow", "broken"
"""Fine; works, but slower than it could or not always; does not work."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and where it is not fine why that matters and what helps.

    >>> Finding("swap", "none in use").verdict
    'ok'
    """

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    cure: str = ""


def slow(name: str, found: str, why: str, cure: str) -> Finding:
    """Something that costs time, or fails under load."""
    return Finding(name, found, SLOW, why, cure)


def broken(name: str, found: str, why: str, cure: str) -> Finding:
    """Something that keeps manyhands, or a device, from working."""
    return Finding(name, found, BROKEN, why, cure)
