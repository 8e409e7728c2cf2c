"""Patience: when a run ends, its message, resuming, and refusals before the start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.core import SettingsError, read_events
from manyhands.training import checkpoint_schedule
from manyhands.training.patience import PatienceState

from ..grouped_options import fit_options
from .problems import problem


class Seen:
    """A metric that is an object; it may compute several values."""

    def update(self, outputs: torch.Tensor, batch: Any) -> None:
        self.value = float(outputs.mean())

    def compute(self) -> float:
        return self.value

    def merge(self, other: Seen) -> None: ...


class Stuck(nn.Module):
    """One weight that moves by one in every step; its values at the ends of epochs are given as a list."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("values", torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values[self.weight.detach().long().clamp(0, len(self.values) - 1)].expand(len(x)) + 0 * self.weight


def task(values: Sequence[float], **changes: Any) -> mh.Task:
    """A task of one step an epoch, whose metric follows a script."""
    return mh.Task(
        model=lambda: Stuck(values),
        loss=lambda model, batch: -model.weight.mean() + 0 * batch.mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        data=torch.ones(4, 1),
        valid=torch.ones(5, 1),
        batch_size=4,
        metrics={
            "score": lambda outputs, batch: outputs.mean(),
            "accuracy": Seen(),
        },
    ).replace(**changes)


def fit(made: mh.Task, folder: Path, on: str = "cpu", **settings: Any) -> mh.Run:
    return mh.fit(made, **fit_options(on=on, folder=folder, progress=False, timeout=60, **{"epochs": 9, **settings}))


def notices(run: mh.Run) -> list[str]:
    entries = [entry["text"] for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "notice"]
    return [text for text in entries if "patience" in text]


@pytest.mark.parametrize("on", ["cpu", "cpu*3"])
def test_run_stops_early_when_the_metric_stops_improving(on: str, tmp_path: Path) -> None:
    made = task([9, 1, 3, 2, 3, 2.9, 3, 1, 1])
    run = fit(made, tmp_path, on, callbacks=[mh.Patience("valid_score", 3, mode="max")])
    assert run.num_steps == 5
    assert not run.stopped
    assert notices(run) == ["out of patience at step 5: valid_score has not got better than 3 in 3 epochs"]
    assert run.metrics["valid_score"] == pytest.approx(2.9)
    assert int(run.model(best=True).weight) == 2  # type: ignore[arg-type]
    assert int(run.model().weight) == 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "steps"),
    [
        ([mh.Patience("valid_score", 2, mode="min")], 3),
        ([mh.Patience("valid_score", 2, mode="min", min_delta=0.5)], 3),
        ([mh.Patience("valid_accuracy", 2)], 9),
        ([mh.Patience("valid_accuracy", 2, min_delta=2.5)], 3),
        ([mh.Patience("loss", 2)], 9),
        ([mh.Patience("loss", 2), mh.Patience("valid_accuracy", 3, mode="min")], 4),
        ([], 9),
    ],
)
def test_patience_supports_modes_min_delta_and_several_criteria(stop: Any, steps: int, tmp_path: Path) -> None:
    assert fit(task(range(10)), tmp_path, callbacks=stop).num_steps == steps


@pytest.mark.parametrize("size", [1, 2])
def test_resume_keeps_the_remaining_patience(size: int, tmp_path: Path) -> None:
    made, on = task([9, 3, 3, 3, 3, 1, 1, 1, 1]), "cpu" if size == 1 else "cpu*2"
    stop = [mh.Patience("valid_score", 3, mode="min")]
    assert fit(made, tmp_path, on, name="it", epochs=3, callbacks=stop).num_steps == 3
    assert fit(made, tmp_path, on, name="it", epochs=3, resume=True, callbacks=stop).num_steps == 3
    run = fit(made, tmp_path, on, name="it", resume=True, callbacks=stop)
    assert run.num_steps == 4
    assert len(notices(run)) == 1
    # A run that ran out of patience stays stopped; with more patience, or none, it continues.
    assert fit(made, tmp_path, on, name="it", resume=True, callbacks=stop).num_steps == 4
    assert (
        fit(made, tmp_path, on, name="it", resume=True, callbacks=[mh.Patience("valid_score", 4, mode="min")]).num_steps
        == 9
    )
    assert fit(made, tmp_path, on, name="it", epochs=10, resume=True).num_steps == 10


def test_patience_on_loss_uses_the_epoch_mean(tmp_path: Path) -> None:
    """With alternating batches the last loss of an epoch is always the same, while its mean falls."""
    watch: list[float] = []

    class Spy(mh.Callback):
        def on_epoch(self, hand: mh.Hand, metrics: Any) -> None:
            watch.append(hand.loss)

    made = task([1], loss=lambda model, batch: -(model.weight * (batch - 1)).mean(), shuffle=False, valid=None)
    made = made.replace(data=torch.cat([torch.full((4, 1), 2.0), torch.ones(4, 1)]), metrics={})
    run = fit(made, tmp_path, callbacks=[mh.Patience("loss", 2), Spy()], epochs=4)
    assert watch == [0.0] * 4
    assert run.num_steps == 8


SCRIPT = [[13.0, 13.0, 13.5, 0.1], [0.3, 0.3, 0.3, 3.0], [5.0, 5.0, 5.0, 0.05]]
"""Losses of three epochs of four steps: the second has the lowest mean, the third the lowest last batch."""


def scripted_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    weight = next(model.parameters())
    step = int(weight.detach())
    return SCRIPT[step // 4][step % 4] - (weight - weight.detach()).mean() + 0 * batch.mean()


@pytest.mark.parametrize("stop", [[], [mh.Patience("loss", 5)]])
def test_best_model_is_from_the_epoch_with_the_lowest_mean_loss(
    stop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without patience, epochs are saved as their cost allows, so that a slow disk would leave some out.
    monkeypatch.setattr(checkpoint_schedule, "GRACE_SECONDS", 1e9)
    made = task([1], loss=scripted_loss, data=torch.ones(8, 1), batch_size=2, valid=None, metrics={})
    settings: dict[str, Any] = {"name": "it", "epochs": 3, "save_every": 1, "callbacks": stop}
    assert int(fit(made, tmp_path, **settings).model(best=True).weight) == 8  # type: ignore[arg-type]
    # A finished run that is resumed has nothing new to measure, and forgets nothing.
    again = fit(made, tmp_path, resume=True, **settings)
    assert (int(again.model().weight), int(again.model(best=True).weight)) == (12, 8)  # type: ignore[arg-type]


def test_mid_epoch_checkpoint_is_not_best_because_of_one_batch_loss(tmp_path: Path) -> None:
    made = task([0.1, 9, 1, 5, 7, 7, 7], data=torch.ones(8, 1))
    made = made.replace(loss=lambda model, batch: model(batch).mean() - (model.weight - model.weight.detach()).mean())
    run = fit(made, tmp_path, epochs=3, save_every=1)
    assert int(run.model(best=True).weight) == 2  # type: ignore[arg-type]


def test_epoch_with_all_steps_skipped_counts_as_no_improvement() -> None:
    watch = PatienceState([mh.Patience("loss", 2)])
    watch.look(1, {"loss": 1.0})
    watch.look(2, {})
    watch.look(3, {})
    assert watch.reason == "loss has not got better than 1 in 2 epochs"


def test_patience_can_watch_losses_of_a_custom_step(tmp_path: Path) -> None:
    made = problem("gan")
    assert fit(made, tmp_path, epochs=2, callbacks=[mh.Patience("critic", 1, mode="max")]).num_steps == 6
    with pytest.raises(SettingsError, match=r"critic, generator; .*but got 'critik'. Did you mean critic\?"):
        fit(made, tmp_path, name="wrong", callbacks=[mh.Patience("critik", 1, mode="max")])
    assert not (tmp_path / "wrong").exists()


def test_nan_metric_counts_as_no_improvement() -> None:
    watch = PatienceState([mh.Patience("loss", 2)])
    for step, value in enumerate((math.nan, 1.0, math.nan), start=1):
        watch.look(step, {"loss": value})
    assert watch.reason == ""
    watch.look(4, {"loss": math.nan})
    assert watch.reason == "loss has not got better than 1 in 2 epochs"
    blind = PatienceState([mh.Patience("loss", 1)])
    blind.look(1, {"loss": math.nan})
    assert blind.reason == "loss was never a number in 1 epoch"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: mh.Patience("valid_los", 3, mode="min"),
            r"valid_loss, .*but got 'valid_los'. Did you mean valid_loss",
        ),
        (lambda: mh.Patience("score", 3, mode="min"), "Did you mean valid_score"),
        (lambda: mh.Patience("valid_loss", 0), "must be a whole number of at least 1, but got 0"),
        (lambda: mh.Patience("valid_loss", 3, mode="less"), "auto, min or max, but got 'less'"),
        (lambda: mh.Patience("valid_loss", 3, min_delta=-1.0), "min_delta must be at least 0"),
        (lambda: mh.Patience("valid_score", 3), 'the direction of a metric must be known.*Write .*mode="max"'),
        (lambda: mh.Patience("valid_accuracy_loss"), "the direction of a metric must be known"),
        (lambda: mh.Patience(3), "the first argument of Patience must be a name"),  # type: ignore[arg-type]
    ],
)
def test_invalid_patience_is_rejected_before_the_run_starts(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        fit(task([1]), tmp_path, "cpu*2", callbacks=[make()])
    assert list(tmp_path.iterdir()) == []


def test_patience_on_validation_metric_needs_validation_data(tmp_path: Path) -> None:
    with pytest.raises(
        SettingsError, match=r"the name of a measured value: loss; valid_ names need a Task with valid="
    ):
        fit(task([1], valid=None, metrics={}), tmp_path, callbacks=[mh.Patience("valid_loss")])


def test_patience_on_unknown_metric_object_value_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="valid_accuracy.*but got 'valid_accuracy_top'"):
        fit(task([1]), tmp_path, callbacks=[mh.Patience("valid_accuracy_top")])
