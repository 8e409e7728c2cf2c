"""Trial: one choice of parameters, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""States. A running trial may be active, paused, or left over by a process that was killed."""


@dataclass(slots=True)
class Trial:
    """One choice of parameters. `values` are the final values of the objectives, in order."""

    number: int
    params: dict[str, Any]
    state: str = RUNNING
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """All metrics of the last measurement."""
    reports: dict[int, float] = field(default_factory=dict)
    """The first objective by epoch, if trials are judged before their end."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or was stopped."""
    kills: list[str] = field(default_factory=list)
    """Why its processes have died; it is retried until there are too many."""
    is_feasible: bool = True
    """Whether it satisfies the limits."""

    @property
    def value(self) -> float:
        """The first objective."""
        return self.values[0]

    @property
    def is_over(self) -> bool:
        return self.state != RUNNING

    @property
    def epochs(self) -> int:
        """Number of epochs that were reported."""
        return max(self.reports, default=0)


def short(value: Any) -> str:
    """Return a parameter or a value as short text.

    >>> short(0.123456), short("relu")
    ('0.1235', 'relu')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)
