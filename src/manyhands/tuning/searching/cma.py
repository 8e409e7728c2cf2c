"""Search by CMA-ES for numeric parameters, with the library `cmaes` that Optuna's sampler uses too.

When a study is resumed, the state of CMA-ES is computed again from the earlier trials. Optuna's sampler stores it as a
pickle instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core import SettingsError
from ..objective import Objective
from ..space import Choice, Space
from ..trial import FAILED, FINISHED, RUNNING, Trial
from .searcher import Searcher


class CMA(Searcher):
    """Search by CMA-ES: proposes trials in generations; the next one starts when all trials of the last have ended."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        super().__init__(space, objectives, seed)
        if len(objectives) > 1:
            raise SettingsError(
                "search='cma' supports only one objective", got=len(objectives), remedy="use search='tpe'"
            )
        choices = [name for name, one in space.items() if isinstance(one, Choice)]
        if choices or len(space) < 2:
            got = f"{choices[0]!r}, a choice" if choices else "one parameter"
            raise SettingsError(
                "search='cma' needs at least two numeric parameters", got=got, remedy="use search='tpe'"
            )
        try:
            import cmaes
        except ImportError:
            raise SettingsError(
                "search='cma' needs cmaes, which is not installed",
                remedy="install it with pip install 'manyhands[tune]'",
            ) from None
        num = len(space)
        bounds = np.array([[0.0, 1.0]] * num)
        self._cma: Any = cmaes.CMA(mean=np.full(num, 0.5), sigma=0.2, bounds=bounds, seed=seed % 2**32)
        self._asked: list[np.ndarray[Any, Any]] = []
        self._num_generations = 0
        """Number of generations whose results CMA-ES has received."""

    def is_ready(self, number: int, history: Sequence[Trial]) -> bool:
        size = int(self._cma.population_size)
        return all(trial.state != RUNNING for trial in history[: number // size * size])

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        self._follow(number, history)
        place = self._asked[number] if not draw else self.random(number, draw).random(len(self.space))
        return {name: one.at(float(share)) for (name, one), share in zip(self.space.items(), place, strict=True)}

    def _follow(self, number: int, history: Sequence[Trial]) -> None:
        """Ask CMA-ES for proposals up to trial `number`; before each generation, report results of the previous one."""
        size = int(self._cma.population_size)
        while len(self._asked) <= number:
            if len(self._asked) == size * (self._num_generations + 1):
                self._update(history[size * self._num_generations : size * (self._num_generations + 1)])
            self._asked.append(self._cma.ask())

    def _update(self, trials: Sequence[Trial]) -> None:
        costs = [self._cost(trial) for trial in trials]
        finite = [cost for cost in costs if math.isfinite(cost)]
        worst = max(finite, default=0.0) + 1.0
        places = [self._place(trial) for trial in trials]
        bounded = [cost if math.isfinite(cost) else worst for cost in costs]
        self._cma.tell(list(zip(places, bounded, strict=True)))
        self._num_generations += 1

    def _place(self, trial: Trial) -> np.ndarray[Any, Any]:
        """Return a trial's parameters as fractions of their ranges; if they are unknown, the proposed fractions."""
        if not trial.params:
            return self._asked[trial.number]
        return np.array([one.share(trial.params[name]) for name, one in self.space.items()])

    def _cost(self, trial: Trial) -> float:
        if trial.state == FAILED or not trial.is_feasible:
            return math.inf
        if trial.state == FINISHED:
            return self.objectives[0].cost(trial.value)
        return self.objectives[0].cost(trial.reports[trial.epochs]) if trial.reports else math.inf
