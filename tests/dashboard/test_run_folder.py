"""What the folder of a run says beside its curves: gaps, clocks, usage and labels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from manyhands.dashboard.run import LONGEST_VALUE, RunFolder

from .logs import Written, a_run


def read(path: Path) -> RunFolder:
    """The folder after all of it was read."""
    folder = RunFolder("runs/first", path)
    while folder.refresh():
        pass
    return folder


def test_gaps_are_steps_with_losses_that_are_not_finite_and_end_at_a_recovery(tmp_path: Path) -> None:
    run = Written(tmp_path / "first")
    run.start()
    run.steps({1: 1.0, 2: math.nan, 3: 1.0, 4: -math.inf})
    assert read(run.path).detail()["gaps"] == {"loss": [2, 4]}
    run.say("recovered", step=3, generation=1, size=1, source="a checkpoint")
    run.steps({4: 1.0})
    run.say("skipped", step=5)
    run.close()
    assert read(run.path).detail()["gaps"] == {"loss": [2], "gradient": [5]}


def test_number_of_gaps_is_bounded(tmp_path: Path) -> None:
    a_run(tmp_path / "first", dict.fromkeys(range(1, 1000), math.nan))
    assert read(tmp_path / "first").detail()["gaps"] == {"loss": list(range(1, 101))}


def test_clock_maps_steps_to_seconds_and_epochs(tmp_path: Path) -> None:
    run = Written(tmp_path / "first")
    run.start(total=10)
    run.steps({1: 1.0, 2: 1.0})
    assert read(run.path).detail()["clock"] == {"seconds": {"x": [2], "y": [1]}, "epochs": {"x": [10], "y": [1]}}
    run.say("epoch", epoch=0, step=3, metrics={}, losses={})
    run.steps({4: 1.0})
    run.close()
    assert read(run.path).detail()["clock"] == {"seconds": {"x": [2, 4], "y": [1, 3]}, "epochs": {"x": [3], "y": [1]}}


def test_long_clock_is_exact_at_the_ends_of_its_intervals(tmp_path: Path) -> None:
    run = Written(tmp_path / "first")
    run.start(total=5000)
    for step in range(1, 5001):
        run.steps({step: 1.0})
    run.close()
    seconds = read(run.path).detail()["clock"]["seconds"]
    assert len(seconds["x"]) <= 1000
    assert seconds["x"] == seconds["y"]


def test_summary_has_a_small_curve_and_the_parameters_with_defaults(tmp_path: Path) -> None:
    record: dict[str, Any] = {"defaults": {"lr": 0.1, "width": 8, "text": "x" * 1000}, "params": {"lr": 0.5}}
    a_run(tmp_path / "first", {step: 1.0 / step for step in range(1, 1000)}, **record, tags=["a"], notes="b")
    summary = read(tmp_path / "first").summary()
    assert len(summary["outline"]) == 32
    assert summary["outline"][-1] == 0.001001
    assert summary["params"] == {"lr": 0.5, "width": 8, "text": "x" * LONGEST_VALUE}
    assert (summary["tags"], summary["notes"]) == (["a"], "b")


def test_damaged_labels_and_usage_are_refused_as_a_whole(tmp_path: Path) -> None:
    run = Written(tmp_path / "first", tags=[1])
    run.say("usage", cpu="much", memory=1)
    run.say("usage", cpu=1.0, memory=1, gpus=[{"used": 1.0}])
    run.say("usage", cpu=math.nan, memory=1.0)
    run.close()
    folder = read(run.path)
    assert "2 lines could not be read" in folder.unreadable
    assert "run.json must be a record of a run" in folder.unreadable
    assert folder.detail()["usage"]["share"] == {}
    assert folder.summary()["tags"] == []
