"""Strategies that come from a plan: "auto", or the file of a saved plan."""

from __future__ import annotations

from pathlib import Path

from ..core import Event, StrategyError, StrategySpec, Task
from ..launcher import Join, JoinedHosts
from .runtime import Where, is_planned


def planned(
    strategy: StrategySpec | str | None, task: Task, on: Where, name: str
) -> tuple[StrategySpec | str | None, list[Event]]:
    """Replace "auto" or the name of a plan file by a strategy, and return it with events about the plan.

    Any other strategy is returned unchanged, without events.
    """
    if not isinstance(strategy, str | Path) or not is_planned(strategy):
        return strategy, []
    if isinstance(on, Join | JoinedHosts):
        raise StrategyError(
            "a job on several hosts needs an explicit strategy",
            got=repr(strategy),
            remedy="pass the strategy that mh.plan chooses",
        )
    from .plan import strategy_of_plan  # imports the planner, which few runs need

    return strategy_of_plan(strategy, task, on, name)
