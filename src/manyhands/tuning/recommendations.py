"""What a study has learned about its parameters: their importance, and what to try next."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from .plots import read_only, silenced
from .searching import require_optuna
from .space import Range
from .trial import Trial, short

MIN_TRIALS = 10
"""Number of finished trials from which importances and edges are more than chance."""
EDGE, NEAR_EDGE = 0.05, 0.15
"""Fractions of a range: the best trial, and the mean of the best ones, are at an edge of it within these."""
NUM_BEST = 5
LITTLE = 0.05
"""Share of the importance below which a parameter hardly matters."""
LATE = 0.8
"""Fraction of the finished trials after which the best one counts as late."""


def importances(journal: Path) -> dict[str, float]:
    """Return the importance of every parameter for the first objective, largest first; they sum to 1.

    They are computed by Optuna (PED-ANOVA) from the journal. Empty if there are too few trials or parameters to tell.
    """
    optuna = require_optuna()
    with warnings.catch_warnings(), silenced(optuna):
        warnings.simplefilter("ignore")
        study = optuna.load_study(study_name=None, storage=read_only(optuna, journal))
        complete = [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]
        names = set.intersection(*(set(trial.params) for trial in complete)) if complete else set()
        if len(complete) < MIN_TRIALS or len(names) < 2:
            return {}
        found = optuna.importance.get_param_importances(
            study,
            evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
            params=sorted(names),
            target=lambda trial: trial.values[0],
            normalize=False,
        )
    whole = sum(found.values())
    return {name: value / whole for name, value in found.items()} if whole > 0 else {}


def importances_if_possible(journal: Path) -> dict[str, float]:
    """Return the importances; none where Optuna is not installed, or cannot compute them for these trials."""
    try:
        return importances(journal)
    except Exception:
        # Optuna reads the journal itself, and raises any exception for a line that is damaged.
        return {}


def recommendations(
    best: Sequence[Trial],
    finished: Sequence[Trial],
    ranges: Mapping[str, Range],
    importance: Mapping[str, float],
) -> list[str]:
    """Return what to try next, most useful first; none for a study with too few trials to tell.

    - `best`: the finished trials, best first; `finished`: the same trials in the order of their numbers;
    - `importance`: the importances, if they are known.
    """
    if len(finished) < MIN_TRIALS:
        return []
    texts = [text for name in ranges if (text := _edge(name, ranges[name], best[:NUM_BEST]))]
    place = finished.index(best[0]) + 1
    if place > LATE * len(finished):
        texts.append(
            f"the best trial, {best[0].number}, is one of the last: more trials may find a better one; resume the "
            f"study with trials={2 * len(finished)}"
        )
    little = [name for name, share in importance.items() if share < LITTLE and not any(name in text for text in texts)]
    if little:
        fixed = ", ".join(f"{name}={short(best[0].params[name])}" for name in little)
        verb = "matters" if len(little) == 1 else "matter"
        texts.append(f"{' and '.join(little)} hardly {verb}: fix {fixed} and search the others")
    if not texts:
        texts.append("the best parameters are inside their ranges: train them for more epochs")
    return texts


def _edge(name: str, values: Range, best: Sequence[Trial]) -> str:
    """Return a text if the best trials are at an edge of a range of numbers; empty otherwise."""
    if not values.is_ordered or any(name not in trial.params for trial in best):
        return ""
    shares = [values.share(trial.params[name]) for trial in best]
    mean = sum(shares) / len(shares)
    for side, where, distance, average in (
        ("lower", 0.0, shares[0], mean),
        ("upper", 1.0, 1 - shares[0], 1 - mean),
    ):
        if distance <= EDGE and average <= NEAR_EDGE:
            beyond = "below" if side == "lower" else "above"
            return f"the best trials are at the {side} edge of {name}: search {beyond} {short(values.at(where))} too"
    return ""
