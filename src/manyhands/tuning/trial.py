"""Trial of a study: one choice of parameters, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""States of a trial. A "running" one may be in progress, queued, paused, or left by a process that was killed."""


@dataclass(slots=True)
class Trial:
    """One choice of parameters in a study, and its results."""

    number: int
    """Position in the study, counted from 0."""
    params: dict[str, Any]
    """The parameters that the searcher has chosen, by name."""
    state: str = RUNNING
    """"running", "finished", "stopped" or "failed"."""
    values: tuple[float, ...] = ()
    """The final values of the objectives, in order; empty until the trial has finished."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The latest value of every metric, by name."""
    reports: dict[int, float] = field(default_factory=dict)
    """Values of the first objective by epoch, if a stopping policy judges trials before their end."""
    seconds: float = 0.0
    """Seconds for which the trial has been trained."""
    reason: str = ""
    """Why the trial failed or was stopped; empty otherwise."""
    kills: list[str] = field(default_factory=list)
    """Why processes of the trial have died, one text each; the third time, the trial fails."""
    is_feasible: bool = True
    """Whether the trial satisfies the limits of the study."""

    @property
    def value(self) -> float:
        """The final value of the first objective; an error before the trial has finished."""
        return self.values[0]

    @property
    def is_over(self) -> bool:
        return self.state != RUNNING

    @property
    def epochs(self) -> int:
        """The latest epoch for which the trial has reported a value; 0 if it has reported none."""
        return max(self.reports, default=0)


def short(value: Any) -> str:
    """Return a parameter or a value as short text.

    >>> short(0.123456), short("relu")
    ('0.1235', 'relu')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)
