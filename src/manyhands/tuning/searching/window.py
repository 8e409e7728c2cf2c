"""Optuna storage in memory, with which a sampler sees only a limited number of earlier trials."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from optuna import create_study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState


def asked(
    sampler: BaseSampler,
    directions: Sequence[StudyDirection],
    trials: list[FrozenTrial],
    distributions: Mapping[str, BaseDistribution],
) -> dict[str, Any]:
    """Return the parameters that an Optuna sampler proposes after `trials`, for a study with these directions."""
    study = create_study(storage=TrialWindow(trials), sampler=sampler, directions=list(directions))
    return dict(study.ask(dict(distributions)).params)


class TrialWindow(BaseStorage):
    """Optuna storage in memory: one study with some earlier trials, and a new one that a sampler fills.

    It implements only what `Study.ask` calls.
    """

    def __init__(self, trials: list[FrozenTrial]) -> None:
        self._trials = trials
        self._by_id = {trial._trial_id: trial for trial in trials}
        self._directions: list[StudyDirection] = []
        self._attributes: dict[str, Any] = {}

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        self._directions = list(directions)
        return 0

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        number = max(self._by_id, default=-1) + 1
        new = FrozenTrial(
            number=number,
            trial_id=number,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=None,
            datetime_complete=None,
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
        )
        self._trials = [*self._trials, new]
        self._by_id[number] = new
        return number

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        trial = self._by_id[trial_id]
        trial.params = {**trial.params, param_name: distribution.to_external_repr(param_value_internal)}
        trial.distributions = {**trial.distributions, param_name: distribution}

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._by_id[trial_id].system_attrs[key] = value

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._by_id[trial_id]

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return [trial for trial in self._trials if states is None or trial.state in states]

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._directions

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        return "window"

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._attributes

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return {}

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._attributes[key] = value

    def get_all_studies(self) -> list[FrozenStudy]:
        raise NotImplementedError

    def delete_study(self, study_id: int) -> None:
        raise NotImplementedError

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        raise NotImplementedError

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        raise NotImplementedError

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        raise NotImplementedError

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        raise NotImplementedError
