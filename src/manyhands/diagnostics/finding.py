"""Finding: the result of one check of the machine."""

from __future__ import annotations

from dataclasses import dataclass

OK, SLOW, BROKEN = "ok", "slow", "broken"
"""Verdicts of checks: no problem; slow, or fails under load; does not work."""


@dataclass(frozen=True)
class Finding:
    """The result of a check of the machine.

    It has the name of the check, what was found, the verdict, and for a problem why it matters and how to fix it.

    >>> Finding("swap", "none in use").verdict
    'ok'
    """

    name: str
    found: str
    verdict: str = OK
    why: str = ""
    remedy: str = ""


def slow(name: str, found: str, why: str, remedy: str) -> Finding:
    """Return a finding of a problem that makes manyhands slow, or fail under load."""
    return Finding(name, found, SLOW, why, remedy)


def broken(name: str, found: str, why: str, remedy: str) -> Finding:
    """Return a finding of a problem that prevents manyhands or a device from working."""
    return Finding(name, found, BROKEN, why, remedy)
