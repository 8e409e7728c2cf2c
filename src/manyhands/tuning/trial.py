"""Trial: one choice of parameters, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
"""A trial that is running may be under way, paused, or left over by a program that was killed."""


@dataclass(slots=True)
class Trial:
    """One choice of parameters. `values` are the objectives' last ones, in their order."""

    number: int
    params: dict[str, Any]
    state: str = RUNNING
    values: tuple[float, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Everything that was measured last."""
    reports: dict[int, float] = field(default_factory=dict)
    """The first objective by epochs, where trials are judged before their end."""
    seconds: float = 0.0
    reason: str = ""
    """Why it failed or was stopped."""
    is_feasible: bool = True
    """Whether it keeps to the limits."""

    @property
    def value(self) -> float:
        """The first objective."""
        return self.values[0]

    @property
    def is_over(self) -> bool:
        return self.state != RUNNING

    @property
    def epochs(self) -> int:
        """How far it has come, where that was reported."""
        return max(self.reports, default=0)
