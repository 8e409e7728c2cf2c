"""Plots of a study as standalone HTML pages, drawn by Optuna from the study's journal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..core import CheckpointError, SettingsError
from .searching import require_optuna

KINDS = {
    "history": "plot_optimization_history",
    "parallel": "plot_parallel_coordinate",
    "importance": "plot_param_importances",
    "contour": "plot_contour",
    "slice": "plot_slice",
    "front": "plot_pareto_front",
}
MIN_TRIALS = 2


def write_plot(journal: Path, kind: str, objectives: Sequence[str], target: Path) -> None:
    """Write a plot of a study's journal as an HTML page to `target`; `kind` is a key of KINDS.

    Raises:
        SettingsError: A package is missing, too few trials have finished, or there are too few objectives.
    """
    optuna = require_optuna()
    try:
        import plotly  # noqa: F401
    except ImportError:
        raise SettingsError(
            "plots need plotly, which is not installed", remedy="install it with pip install 'manyhands[tune]'"
        ) from None
    storage = read_only(optuna, journal)
    study = optuna.load_study(study_name=None, storage=storage)
    if len([trial for trial in study.get_trials(deepcopy=False) if trial.state.name == "COMPLETE"]) < MIN_TRIALS:
        raise SettingsError("a plot needs at least two finished trials", got="fewer than two", remedy="run more trials")
    options: dict[str, Any] = {}
    if kind == "front":
        if len(objectives) < 2:
            raise SettingsError(
                "a Pareto front needs two or three objectives", got=len(objectives), remedy='plot the "history"'
            )
        options["target_names"] = list(objectives)
    elif len(objectives) > 1:
        options.update(target=lambda trial: trial.values[0], target_name=objectives[0])
    else:
        options["target_name"] = objectives[0]
    if kind == "importance":
        options["evaluator"] = optuna.importance.PedAnovaImportanceEvaluator()
    with warnings.catch_warnings(), silenced(optuna):
        warnings.simplefilter("ignore")
        figure = getattr(optuna.visualization, KINDS[kind])(study, **options)
        figure.write_html(target, include_plotlyjs=True)


@contextlib.contextmanager
def silenced(optuna: Any) -> Iterator[None]:
    """Context in which Optuna logs only errors, without its messages about parameters that a plot omits."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def read_only(optuna: Any, journal: Path) -> Any:
    """Return Optuna's storage for a journal file; it needs no lock, because plots only read it."""
    try:
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
    except Exception as error:
        raise CheckpointError(
            "Optuna must be able to read every line of the journal",
            got=f"{journal} ({type(error).__name__}: {error})",
            remedy="remove the damaged lines from a copy, and open that",
        ) from error
