"""Strategies that come from a plan: "auto", or the file of a saved plan."""

from __future__ import annotations

from pathlib import Path

from ..core import Event, StrategyError, StrategySpec, Task
from ..launcher import Join, JoinedHosts
from .runtime import Where, is_planned


def planned(
    strategy: StrategySpec | str | None, task: Task, on: Where, name: str
) -> tuple[StrategySpec | str | None, list[Event]]:
    """Return the strategy with "auto" planned or a plan file read, and the events that describe the plan."""
    if not isinstance(strategy, str | Path) or not is_planned(strategy):
        return strategy, []
    if isinstance(on, Join | JoinedHosts):
        raise StrategyError(
            "a job on several hosts needs an explicit strategy",
            got=repr(strategy),
            remedy="pass the strategy that mh.plan chooses",
        )
    from .plan import strategy_of_plan  # the planner, which few runs need

    return strategy_of_plan(strategy, task, on, name)
