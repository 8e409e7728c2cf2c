"""Conclusions of a study: importance, edges of ranges, late best trials, parameters that hardly matter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.tuning import Trial, integers, loguniform, uniform
from manyhands.tuning.recommendations import recommendations

QUIET = mh.options.Display(progress=False)


def searched(
    folder: Path, fn: Callable[..., float], space: Mapping[str, Any], trials: int = 40, progress: bool | None = False
) -> mh.tuning.Study:
    return mh.tune(
        fn,
        space,
        trials=trials,
        objective="height:min",
        folder=folder,
        on="cpu",
        name="study",
        options=[mh.options.Display(progress=progress), mh.options.Algorithm(search="random")],
    )


def valley(x: float = 0.0, y: float = 0.0) -> float:
    """Depends on x a hundred times as much as on y."""
    return (x - 1) ** 2 + 0.0001 * y


SPACE = {"x": mh.tuning.uniform(0.0, 10.0), "y": mh.tuning.uniform(0.0, 1.0)}


def test_importance_names_the_parameter_that_decides(tmp_path: Path) -> None:
    found = searched(tmp_path, valley, SPACE).importance()
    assert list(found) == ["x", "y"]
    assert found["x"] > 0.8
    assert sum(found.values()) == pytest.approx(1.0)


def test_importance_is_empty_with_few_trials_or_one_parameter(tmp_path: Path) -> None:
    few = searched(tmp_path / "few", valley, SPACE, trials=9)
    assert few.importance() == {}
    assert few.recommendations == []
    assert few.conclusions() == []
    single = searched(tmp_path / "single", lambda x=0.0: (x - 1) ** 2, {"x": SPACE["x"]}, trials=12)
    assert single.importance() == {}


def test_study_without_optuna_recommends_but_has_no_importance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = searched(tmp_path, lambda x=0.0, y=0.0: x, SPACE)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SettingsError, match=r"pip install 'manyhands\[tune\]'"):
        study.importance()
    assert study.recommendations[0] == "the best trials are at the lower edge of x: search below 0 too"


def test_tune_prints_importance_and_recommendation_unless_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched(tmp_path / "quiet", valley, SPACE)
    assert "importance" not in capsys.readouterr().err
    study = searched(tmp_path / "shown", valley, SPACE, progress=None)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-len(study.conclusions()) :] == study.conclusions()
    assert lines[-len(study.conclusions())].startswith("importance of the parameters: x ")
    again = mh.tuning.Study(study.path)
    assert again.conclusions() == study.conclusions()


def finished(*params: Mapping[str, Any]) -> list[Trial]:
    """Trials with these parameters, whose values grow with their numbers."""
    return [Trial(n, dict(p), state="finished", values=(float(n),)) for n, p in enumerate(params)]


RANGES = {"lr": loguniform(1e-4, 1e-1), "width": integers(1, 100), "drop": uniform(0.0, 0.5)}


@pytest.mark.parametrize(
    ("lr", "width", "text"),
    [
        (9e-2, 50, "the best trials are at the upper edge of lr: search above 0.1 too"),
        (1.1e-4, 50, "the best trials are at the lower edge of lr: search below 0.0001 too"),
        (3e-3, 1, "the best trials are at the lower edge of width: search below 1 too"),
        (3e-3, 50, "the best parameters are inside their ranges: train them for more epochs"),
    ],
)
def test_recommendation_names_the_edge_of_a_range(lr: float, width: int, text: str) -> None:
    trials = finished(*({"lr": lr, "width": width, "drop": 0.2 + 0.001 * n} for n in range(12)))
    assert recommendations(trials, trials, RANGES, {}) == [text]


def test_one_trial_at_an_edge_is_not_called_an_edge() -> None:
    trials = finished({"lr": 1e-1}, *({"lr": 1e-3} for _ in range(11)))
    assert recommendations(trials, trials, {"lr": RANGES["lr"]}, {}) == [
        "the best parameters are inside their ranges: train them for more epochs"
    ]


def test_recommendation_for_a_late_best_trial_and_for_parameters_that_hardly_matter() -> None:
    trials = finished(*({"lr": 3e-3, "width": 50, "drop": 0.25} for _ in range(20)))
    best = trials[::-1]
    late, little = recommendations(best, trials, RANGES, {"lr": 0.9, "width": 0.06, "drop": 0.04})
    assert late == (
        "the best trial, 19, is one of the last: more trials may find a better one; resume the study with trials=40"
    )
    assert little == "drop hardly matters: fix drop=0.25 and search the others"
