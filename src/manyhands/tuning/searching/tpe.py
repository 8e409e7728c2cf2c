"""Search by the tree-structured Parzen estimator (TPE) of Optuna, also for several objectives.

Optuna gets only a limited number of earlier trials: the best, and the latest others. So a proposal takes as long after
ten thousand trials as after a few hundred.
"""

from __future__ import annotations

import bisect
import json
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core import SettingsError, mix
from ..journal import describe
from ..objective import Objective
from ..space import Space
from ..trial import FAILED, FINISHED, RUNNING, STOPPED, Trial
from .searcher import Searcher

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

NUM_BEST = 25
"""Number of best trials that Optuna gets: as many as its estimator counts as good."""
NUM_OTHERS = 175
"""Number of the latest other trials that Optuna gets."""


class TPE(Searcher):
    """Search by TPE: proposes parameters that are more likely among the good trials than among the others."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        super().__init__(space, objectives, seed)
        optuna = require_optuna()
        self._distributions = {
            name: optuna.distributions.json_to_distribution(json.dumps(describe(one))) for name, one in space.items()
        }
        self._shown: dict[int, FrozenTrial] = {}
        self._best: list[tuple[bool, float, int]] = []
        """For each of the best trials: whether it is infeasible, its cost and its number."""

    def observe(self, trial: Trial) -> None:
        if trial.state == FINISHED:
            # With several objectives, only the first one selects the trials for Optuna, which uses all objectives.
            bisect.insort(self._best, (not trial.is_feasible, self.objectives[0].cost(trial.value), trial.number))
            del self._best[NUM_BEST:]

    def propose(self, number: int, history: Sequence[Trial], draw: int = 0) -> dict[str, Any]:
        from .window import asked

        optuna = require_optuna()
        shown = self._window(history)
        self._shown = {trial.number: self._shown.get(trial.number) or self._frozen(trial) for trial in shown}
        running = {trial.number for trial in shown if trial.state == RUNNING}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            seed = mix(self.seed, number, draw) % 2**32
            sampler = optuna.samplers.TPESampler(seed=seed)
            sides = {"min": optuna.study.StudyDirection.MINIMIZE, "max": optuna.study.StudyDirection.MAXIMIZE}
            directions = [sides[one.mode] for one in self.objectives]
            chosen = asked(sampler, directions, list(self._shown.values()), self._distributions)
        for unfinished in running:
            del self._shown[unfinished]
        return {name: chosen[name] for name in self.space}

    def _window(self, history: Sequence[Trial]) -> list[Trial]:
        """Return the trials that Optuna gets, in order of their numbers: the best, and the latest others."""
        picked = {number: history[number] for _, _, number in self._best}
        others = 0
        for trial in reversed(history):
            if others == NUM_OTHERS:
                break
            if trial.number not in picked and trial.state != FAILED:
                picked[trial.number] = trial
                others += 1
        return [picked[number] for number in sorted(picked)]

    def _frozen(self, trial: Trial) -> FrozenTrial:
        """Return a trial as Optuna's FrozenTrial; a trial that was stopped early becomes a pruned one."""
        optuna = require_optuna()
        state = {FINISHED: "COMPLETE", STOPPED: "PRUNED", RUNNING: "RUNNING"}[trial.state]
        values = list(trial.values) or None
        if state == "COMPLETE" and values is not None and not all(map(math.isfinite, values)):
            state, values = "PRUNED", None
        if state != "COMPLETE":
            values = None
        attributes = {"constraints": [-1.0 if trial.is_feasible else 1.0]}
        frozen: FrozenTrial = optuna.trial.FrozenTrial(
            number=trial.number,
            trial_id=trial.number,
            state=optuna.trial.TrialState[state],
            value=None,
            values=values,
            datetime_start=None,
            datetime_complete=None,
            params=dict(trial.params),
            distributions=self._distributions,
            user_attrs={},
            system_attrs=attributes if trial.state == FINISHED else {},
            intermediate_values=dict(trial.reports),
        )
        return frozen


def require_optuna() -> Any:
    """Import Optuna, limit its log to warnings, and return it; raise SettingsError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise SettingsError(
            "the search 'tpe' and plots need Optuna, which is not installed",
            remedy="install it with pip install 'manyhands[tune]', or use search=\"random\"",
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
