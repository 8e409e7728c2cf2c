"""Attacks on servers, jobs and files, each a function that performs one on loopback and says what came of it.

The test suite runs every attack once; `python -m benchmarks.attacks` runs them under normal load and measures what
honest clients notice.
"""

from .outcome import Outcome

__all__ = ["Outcome"]
