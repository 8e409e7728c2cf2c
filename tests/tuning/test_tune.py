"""mh.tune: results, kept networks, and refusals."""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.core import SettingsError
from manyhands.distributed import resolve
from manyhands.tuning import Stacked, StudyView, Trial, TrialRunner, TrialsFailed, as_objectives
from manyhands.tuning.journal import JOURNAL
from manyhands.tuning.trial_work import TrialWork

from ..grouped_options import tune_options
from . import networks

SPACE = {"lr": mh.tuning.loguniform(1e-4, 1e-1), "width": mh.tuning.choice(4, 8)}


def bowl(x: float = 0.0, y: float = 1.0, **kept: Any) -> float:
    return (x - 2) ** 2 + (y - 0.1) ** 2


def tune(task: Any, space: Any, params: Mapping[str, Any] | None = None, **options: Any) -> mh.tuning.Study:
    task = functools.partial(task, **params) if params else task
    return mh.tune(task, space, **tune_options(**{"on": "cpu", "progress": False, **options}))


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_study_trials_equal_separate_fits(tmp_path: Path, on: str) -> None:
    study = tune(networks.task, SPACE, trials=4, epochs=2, search="random", on=on, folder=tmp_path, keep=4)
    assert [trial.state for trial in study.trials] == ["finished"] * 4
    for trial in study.trials:
        alone = mh.fit(
            networks.task(**trial.params),
            "single",
            epochs=2,
            on="cpu",
            folder=tmp_path / "alone",
            options=mh.options.Display(progress=False),
        )
        assert trial.value == pytest.approx(alone.metrics["valid_loss"], rel=1e-6)
        assert mh.evaluate(study.run(trial))["loss"] == pytest.approx(trial.value, rel=1e-6)
    assert study.best.value == min(trial.value for trial in study.trials)


def test_asha_resumes_paused_trials_without_changing_results(tmp_path: Path) -> None:
    study = tune(networks.task, SPACE, trials=9, epochs=9, stop="asha", search="random", folder=tmp_path)
    steps = sum(trial.epochs for trial in study.trials)
    assert steps < 9 * 9 / 2
    assert {trial.state for trial in study.trials} == {"finished", "stopped"}
    best = study.best
    assert sorted(best.reports) == [1, 3, 9]
    alone = mh.fit(
        networks.task(**best.params),
        "single",
        epochs=9,
        on="cpu",
        folder=tmp_path / "a",
        options=mh.options.Display(progress=False),
    )
    assert best.value == pytest.approx(alone.metrics["valid_loss"], rel=1e-5)
    assert [best.reports[epochs] for epochs in (1, 3)] == pytest.approx(
        [alone.history["valid_loss"][4 * epochs] for epochs in (1, 3)], rel=1e-5
    )


@pytest.mark.parametrize("stop", ["median", "hyperband"])
def test_other_stop_policies_stop_some_and_finish_some_trials(tmp_path: Path, stop: str) -> None:
    study = tune(networks.task, SPACE, trials=9, epochs=3, stop=stop, search="random", folder=tmp_path)
    states = [trial.state for trial in study.trials]
    assert set(states) == {"finished", "stopped"}
    assert all(trial.epochs == 3 for trial in study.trials if trial.state == "finished")


@pytest.mark.parametrize("execution", [None, "stacked"])
def test_small_asha_study_trains_the_best_trials_to_the_end(tmp_path: Path, execution: str | None) -> None:
    space = {"lr": [1e-3, 1e-2]}
    study = tune(networks.task, space, search="grid", stop="asha", epochs=9, execution=execution, folder=tmp_path)
    assert [trial.epochs for trial in study.trials] == [1, 9]
    assert study.run(study.best).path.exists()
    more = tune(
        networks.task, space, search="grid", stop="asha", epochs=3, execution=execution, keep=2, folder=tmp_path
    )
    assert [trial.epochs for trial in more.top(2)] == [3, 3]


def test_remaining_time_is_shown_once_it_can_be_estimated() -> None:
    trials = [Trial(number, {}) for number in range(8)]
    view = StudyView(as_objectives("loss"), 20)
    view.begin(trials)
    for number in range(3):
        trials[number].state = "stopped"
    assert "left" not in view._summary(3)  # of eight that run side by side
    trials[3].reports[1] = 0.5
    assert "left" in view._summary(3)


def test_study_with_several_objectives_has_a_pareto_front(tmp_path: Path) -> None:
    def measure(x: float = 0.0, y: float = 0.0) -> dict[str, float]:
        return {"loss": (x - 1) ** 2, "accuracy": -((x + 1) ** 2), "size": y}

    study = tune(
        measure,
        {"x": mh.tuning.uniform(-3, 3), "y": mh.tuning.uniform(0, 2)},
        objective=["loss", "accuracy"],
        trials=60,
        constraint=lambda params: params["x"] + params["y"] < 2.5,
        limits={"size": 1.0},
        folder=tmp_path,
    )
    assert all(trial.params["x"] + trial.params["y"] < 2.5 for trial in study.trials)
    assert all(trial.metrics["size"] <= 1.0 for trial in study.finished)
    assert any(not trial.is_feasible for trial in study.trials)
    front = study.front
    assert 1 < len(front) < len(study.finished)
    for one in front:
        assert not any(o.values[0] < one.values[0] and o.values[1] > one.values[1] for o in study.finished)


def test_study_resumes_by_name(tmp_path: Path) -> None:
    space = {"x": mh.tuning.uniform(-5.0, 5.0), "y": mh.tuning.loguniform(1e-3, 10.0)}
    where = {"params": {"where": tmp_path, "also": (1, 2)}}  # nothing that JSON has
    whole = tune(bowl, space, trials=30, folder=tmp_path, name="whole", **where)
    part = tune(bowl, space, trials=12, folder=tmp_path, name="part", resume="auto", **where)
    assert len(part.trials) == 12
    part = tune(bowl, space, trials=30, folder=tmp_path, name="part", resume="auto", **where)
    assert [trial.params for trial in part.trials] == [trial.params for trial in whole.trials]
    with pytest.raises(SettingsError, match="must have the search with which it was started, tpe, but got random"):
        tune(bowl, space, trials=30, folder=tmp_path, name="part", resume=True, search="random", **where)
    with pytest.raises(SettingsError, match="must not exist yet"):
        tune(bowl, space, trials=30, folder=tmp_path, name="part")
    with pytest.raises(SettingsError, match="resume needs the name of the run"):
        tune(bowl, space, trials=30, folder=tmp_path, resume="auto")
    opened = mh.tuning.Study(tmp_path / "part")
    assert opened.best.params == part.best.params


def test_time_or_cost_limit_ends_a_study(tmp_path: Path) -> None:
    space = {"x": mh.tuning.uniform(-5.0, 5.0)}
    for options in ({"seconds": 0.2}, {"cost": 0.2, "price": 3600.0}):
        study = tune(bowl, space, search="random", folder=tmp_path, **options)
        assert len(study.trials) > 1
    with pytest.raises(SettingsError, match="a study needs a limit"):
        tune(bowl, space, folder=tmp_path)
    with pytest.raises(SettingsError, match="price of a device per hour"):
        tune(bowl, space, folder=tmp_path, cost=1.0)
    assert len(tune(bowl, {"x": [1.0, 2.0, 3.0]}, search="grid", folder=tmp_path).trials) == 3


def test_failed_or_diverged_trial_does_not_affect_other_trials(tmp_path: Path) -> None:
    def sometimes(x: float = 0.0) -> float:
        if x < 0:
            raise ArithmeticError("below zero")
        return x

    study = tune(sometimes, {"x": mh.tuning.uniform(-1.0, 3.0)}, trials=20, search="random", folder=tmp_path)
    failed = [trial for trial in study.trials if trial.state == "failed"]
    assert failed
    assert all(trial.params["x"] < 0 and trial.reason == "ArithmeticError: below zero" for trial in failed)
    wild = tune(networks.task, {"lr": [1e-2, math.inf]}, search="grid", folder=tmp_path)
    assert [trial.state for trial in wild.trials] == ["finished", "stopped"]
    assert "nan" in wild.trials[1].reason


def test_trial_with_nan_objective_is_stopped_and_never_best(tmp_path: Path) -> None:
    def partly(x: float = 0.0) -> float:
        return math.nan if x < 0.5 else x

    study = tune(partly, {"x": mh.tuning.uniform(0, 1)}, trials=25, folder=tmp_path)
    assert all(trial.state == ("stopped" if trial.params["x"] < 0.5 else "finished") for trial in study.trials)
    assert study.best.value == min(trial.params["x"] for trial in study.finished)
    assert "its valid_loss is nan" in next(trial.reason for trial in study.trials if trial.state == "stopped")


def test_grid_search_skips_points_excluded_by_the_constraint(tmp_path: Path) -> None:
    def looked(x: int = 0, y: int = 0) -> float:
        assert x != y, "not even to see whether trials stack"
        return x * y

    space = {"x": [1, 2, 3], "y": [1, 2, 3]}
    study = tune(looked, space, search="grid", constraint=lambda params: params["x"] != params["y"], folder=tmp_path)
    assert [tuple(trial.params.values()) for trial in study.trials] == [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]


@pytest.mark.parametrize("on", ["cpu", "cpu*2"])
def test_three_identical_failures_end_a_study_with_the_traceback(tmp_path: Path, on: str) -> None:
    def broken(x: float = 0.0) -> float:
        raise ArithmeticError("always")

    with pytest.raises(
        TrialsFailed, match=r"3 trials failed with the same error(.|\n)*in broken(.|\n)*ArithmeticError: always"
    ):
        tune(broken, {"x": mh.tuning.uniform(0, 1)}, trials=50, folder=tmp_path, on=on, name="broken")
    study = mh.tuning.Study(tmp_path / "broken")
    assert len(study.trials) <= 6
    assert " failed" in repr(study)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"space": {"rate": mh.tuning.uniform(0, 1)}},
            "of the task, which has lr, width, seed, but got 'rate'",
        ),
        ({"space": {"lr": mh.tuning.uniform(0, 1)}, "params": {"lr": 1}}, "fixed or searched, but got 'lr' in both"),
        ({"objective": "valid_f1"}, "something that the task measures: loss, valid_loss, valid_accuracy, but got 'val"),
        ({"task": networks.task()}, "needs a function that returns a Task.*, but got Task"),
        ({"stop": "soon"}, "stop must be one of asha, hyperband, median, but got 'soon'"),
        ({"execution": "magic"}, "execution must be stacked or processes, but got 'magic'"),
        ({"trials": 0}, "trials must be a whole number of at least 1, but got 0"),
        ({"constraint": lambda params: False}, "the constraint must accept some of the proposals"),
        ({"constraint": lambda params: False, "search": "grid"}, "must accept at least one combination of the grid"),
        (
            {"space": {"width": mh.tuning.uniform(4, 9)}},
            "width must be a whole number in the task, but got mh.tuning.uniform. Use mh.tuning.in",
        ),
        ({"space": {"width": [4, "wide"]}}, "width must be of type int, but got 'wide'"),
    ],
)
def test_invalid_study_settings_are_rejected_and_leave_no_files(
    tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    options: dict[str, Any] = {"task": networks.task, "space": SPACE, "trials": 3, "folder": tmp_path / "s", **given}
    with pytest.raises(SettingsError, match=words):
        tune(options.pop("task"), options.pop("space"), **options)
    assert not list((tmp_path / "s").glob("*"))


def test_unmeasured_objective_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="a trial reports \\(error\\), but got 'valid_loss'"):
        tune(lambda x=0.0: {"error": x}, {"x": mh.tuning.uniform(0, 1)}, trials=3, folder=tmp_path)


def test_study_exports_dataframe_plots_and_json(tmp_path: Path) -> None:
    study = tune(bowl, {"x": mh.tuning.uniform(-5, 5), "y": mh.tuning.uniform(0, 1)}, trials=12, folder=tmp_path)
    frame = study.dataframe()
    assert len(frame) == 12
    assert frame["valid_loss"].min() == study.best.value
    for kind in ("history", "parallel", "importance", "contour"):
        assert "<html" in study.plot(kind).read_text()[:200]
    with pytest.raises(SettingsError, match="a plot must be one of history"):
        study.plot("pie")
    assert json.dumps(study.to_dict())


def test_memory_and_journal_size_per_trial_are_bounded(tmp_path: Path) -> None:
    """What is kept of a trial is a few hundred bytes; time is the benchmark's matter."""
    import tracemalloc

    space = {"x": mh.tuning.uniform(-5, 5)}
    tune(bowl, space, trials=50, search="random", folder=tmp_path, name="many")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        study = tune(bowl, space, trials=350, search="random", folder=tmp_path, name="many", resume=True)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(study.trials) == 350
    assert grown < 350 * 1500
    assert (study.path / JOURNAL).stat().st_size < 350 * 1500


def test_tune_keeps_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    tune(networks.task, SPACE, trials=1, folder=tmp_path)
    assert torch.equal(torch.rand(3), wanted)


@pytest.mark.parametrize("stop", [None, "asha"])
def test_stacked_trials_equal_trials_in_separate_processes(tmp_path: Path, stop: str | None) -> None:
    options: dict[str, Any] = {"trials": 10, "epochs": 3, "stop": stop, "search": "random", "keep": 10}
    both = {
        kind: tune(networks.task, SPACE, execution=kind, folder=tmp_path / kind, **options)
        for kind in ("stacked", "processes")
    }
    stacked, apart = (both[kind].trials for kind in ("stacked", "processes"))
    assert [trial.params for trial in stacked] == [trial.params for trial in apart]
    for one, other in zip(stacked, apart, strict=True):
        known = set(one.reports) & set(other.reports)
        assert [one.reports[e] for e in known] == pytest.approx([other.reports[e] for e in known], rel=1e-4)
        if one.values and other.values:
            assert one.value == pytest.approx(other.value, rel=1e-4)
            run = both["stacked"].run(one)
            assert mh.evaluate(run)["loss"] == pytest.approx(one.value, rel=1e-4)
    assert any(trial.values for trial in stacked)


def test_resumed_stacked_study_proposes_the_same_trials(tmp_path: Path) -> None:
    space = {"lr": SPACE["lr"]}
    options: dict[str, Any] = {"epochs": 3, "stop": "asha", "search": "random", "execution": "stacked"}
    whole = tune(networks.task, space, trials=12, folder=tmp_path, name="whole", **options)
    tune(networks.task, space, trials=5, folder=tmp_path, name="part", **options)
    part = tune(networks.task, space, trials=12, folder=tmp_path, name="part", resume=True, **options)
    assert [trial.params for trial in part.trials] == [trial.params for trial in whole.trials]
    assert all(trial.is_over for trial in part.trials)


def test_model_build_error_fails_only_its_trial(tmp_path: Path) -> None:
    def sometimes(lr: float = 0.1) -> mh.Task:
        def build() -> torch.nn.Module:
            if lr in (0.1, 0.4):
                raise ArithmeticError("no such network")
            return torch.nn.Linear(4, 2)

        return networks.task(lr=lr).replace(model=build)

    space = {"lr": [0.1, 0.2, 0.3, 0.4, 0.5]}
    study = tune(sometimes, space, search="grid", folder=tmp_path, execution="stacked")
    assert [trial.state for trial in study.trials] == ["failed", "finished", "finished", "failed", "finished"]
    assert study.trials[3].reason == "ArithmeticError: no such network"


def test_empty_populations_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.tuning.vectorized_trials.MAX_STACKS", 2)
    workshop = TrialRunner(networks.task, {}, 1, tmp_path, as_objectives("valid_loss"))
    with contextlib.closing(Stacked(workshop, resolve("cpu", 1)[0][0], 1, print, must_stack=True)) as executor:
        for number, width in enumerate((3, 4, 5, 5)):
            executor.start(TrialWork(number, {"width": width}, 1))
            assert executor.wait()[0].epochs == 1
            assert len(executor._stacks) == min(number + 1, 2)


def test_stacked_execution_of_an_unsupported_task_raises_the_reason(tmp_path: Path) -> None:
    def stepping(lr: float = 0.1) -> mh.Task:
        made = networks.task(lr=lr)
        return made.replace(loss=None, step=lambda hand, batch: hand.minimize(networks.loss(hand.model, batch)))

    with pytest.raises(SettingsError, match="a stacked task must have a loss, but got a task with step="):
        tune(stepping, {"lr": [0.1]}, search="grid", objective="loss", execution="stacked", folder=tmp_path)
    study = tune(stepping, {"lr": [0.1, 0.2]}, search="grid", objective="loss", folder=tmp_path)
    assert len(study.finished) == 2
