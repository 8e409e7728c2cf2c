"""Learning rates: PyTorch's schedulers give the rates of a plain loop, on any layout and after a resume."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import manyhands as mh
from manyhands.core import SettingsError, TaskError, read_events
from manyhands.distributed import NullWorld
from manyhands.training import Hand, Job, RecoveryState, TrainingLoop

from ..grouped_options import fit_options
from .problems import classify, generator, mlp

EPOCHS, STEPS, ROWS, BATCH = 4, 4, 26, 8
"""Four epochs of three full batches and one of two rows."""
IMAGES = torch.randn(ROWS, 12, generator=generator(0)).double()
LABELS = torch.randint(0, 5, (ROWS,), generator=generator(1))
Make = Callable[[Any], Any]


def two_groups(model: Any) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:]}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def task(**changes: Any) -> mh.Task:
    return mh.Task(
        model=lambda: mlp().double(),
        loss=classify,
        optimizer=two_groups,
        data=(IMAGES, LABELS),
        valid=(IMAGES[:10], LABELS[:10]),
        batch_size=BATCH,
        shuffle=False,
    ).replace(**changes)


def fit(made: mh.Task, folder: Path, *args: Any, **settings: Any) -> mh.Run:
    where = settings.pop("on", "cpu")
    return mh.fit(made, *args, **fit_options(on=where, folder=folder, progress=False, **{"epochs": EPOCHS, **settings}))


def plain(make: Make, *, every: str, metric: bool = False, drop_last: bool = False) -> list[float]:
    """The losses of a loop as PyTorch's documentation writes it."""
    model = reference_model()
    optimizer = two_groups(model)
    scheduler = make(optimizer)
    losses = []
    for _ in range(EPOCHS):
        for start in range(0, ROWS - (BATCH - 1 if drop_last else 0), BATCH):
            batch = IMAGES[start : start + BATCH], LABELS[start : start + BATCH]
            loss = classify(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if every == "step":
                scheduler.step()
        if every == "epoch":
            with torch.no_grad():
                valid = float(classify(model, (IMAGES[:10], LABELS[:10])))
            scheduler.step(*([valid] if metric else []))
    return losses


def reference_model() -> Any:
    """The network with the weights that `fit` starts with."""
    return copy.deepcopy(_initial_model())


@functools.cache
def _initial_model() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        untrained = task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
        return fit(untrained, Path(folder), steps=1).model()


def warm_up(optimizer: Any) -> Any:
    first = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    return schedulers.SequentialLR(optimizer, [first, schedulers.CosineAnnealingLR(optimizer, 13)], milestones=[3])


CASES: dict[str, tuple[Make, str]] = {
    "step": (lambda optimizer: schedulers.StepLR(optimizer, 2, gamma=0.1), "epoch"),
    "cosine": (lambda optimizer: schedulers.CosineAnnealingLR(optimizer, EPOCHS), "epoch"),
    "lambda": (lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 1 / (1 + step)), "step"),
    "warm-up": (warm_up, "step"),
    "one cycle": (
        lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * STEPS, cycle_momentum=False),
        "step",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_schedulers_of_torch_give_the_losses_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    make, every = CASES[name]
    run = fit(task(schedule=mh.TorchScheduler(make, every=every)), tmp_path)
    assert list(run.losses) == pytest.approx(plain(make, every=every), rel=1e-9)


def plateau(optimizer: Any) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)


def test_plateau_follows_the_validation_loss(tmp_path: Path) -> None:
    run = fit(task(schedule=mh.TorchScheduler(plateau, metric="valid_loss")), tmp_path)
    expected = plain(plateau, every="epoch", metric=True)
    assert list(run.losses) == pytest.approx(expected, rel=1e-9)
    constant = plain(lambda optimizer: schedulers.ConstantLR(optimizer, 1.0), every="epoch")
    assert expected != pytest.approx(constant, rel=1e-6), "the rate must change, so that the test can fail"


@pytest.mark.parametrize("make", [CASES["step"][0], plateau])
def test_schedulers_are_the_same_on_two_replicas_and_after_a_resume(make: Make, tmp_path: Path) -> None:
    metric = "valid_loss" if make is plateau else None
    made = task(schedule=mh.TorchScheduler(make, metric=metric))
    whole = fit(made, tmp_path)
    fit(made, tmp_path, name="parts", steps=10)
    resumed = fit(made, tmp_path, mh.Mirrored(2), on="cpu*2", name="parts", resume=True)
    assert list(resumed.losses) == pytest.approx(list(whole.losses), rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        (lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=16), "OneCycleLR, which changes momentum"),
        (
            lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=2, cycle_momentum=False),
            "must accept every step of the run",
        ),
        (lambda o: None, "must return a torch.optim.lr_scheduler"),
        (plateau, "ReduceLROnPlateau with metric=None"),
    ],
)
def test_schedulers_that_cannot_be_followed_are_refused(schedule: Make, error: str, tmp_path: Path) -> None:
    with pytest.raises((TaskError, SettingsError), match=error):
        fit(task(schedule=mh.TorchScheduler(schedule)), tmp_path)


def test_metric_that_is_never_measured_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"TorchScheduler needs .*valid_loss.*Did you mean valid_loss"):
        fit(task(schedule=mh.TorchScheduler(plateau, metric="valid_los")), tmp_path)


def test_function_of_the_optimizer_is_refused_with_the_way_to_pass_it() -> None:
    with pytest.raises(TaskError, match=r"write mh\.TorchScheduler\(function\)"):
        task(schedule=lambda optimizer: schedulers.StepLR(optimizer, 1))


@pytest.mark.parametrize(
    "schedule", [schedulers.StepLR, schedulers.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 1)]
)
def test_scheduler_itself_is_refused_with_the_way_to_pass_it(schedule: Any) -> None:
    with pytest.raises(TaskError, match=r"mh\.TorchScheduler\(lambda optimizer: StepLR"):
        task(schedule=schedule)


def test_drop_last_leaves_out_the_smaller_batch(tmp_path: Path) -> None:
    run = fit(task(drop_last=True), tmp_path, mh.Mirrored(2), on="cpu*2")
    constant = plain(lambda optimizer: schedulers.ConstantLR(optimizer, 1.0), every="epoch", drop_last=True)
    assert len(run.losses) == EPOCHS * (ROWS // BATCH)
    assert list(run.losses) == pytest.approx(constant, rel=1e-9)


def test_norms_of_clipped_gradients_are_logged(tmp_path: Path) -> None:
    for strategy, where in ((mh.Single(), "cpu"), (mh.Mirrored(2), "cpu*2"), (mh.Sharded(2), "cpu*2")):
        run = fit(task(clip=0.1), tmp_path, strategy, on=where, steps=1)
        logged = [entry for entry in read_events(run.path / "events.jsonl") if entry["kind"] == "steps"]
        model = reference_model()
        classify(model, (IMAGES[:BATCH], LABELS[:BATCH])).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert logged[-1]["gradient_norm"] == {"": pytest.approx(float(norm), rel=1e-9)}


def test_state_is_available_to_ranks_whose_peers_fail_before_the_schedule_is_known() -> None:
    job = Job(task=task(), spec=mh.Single(), folder=Path("runs"))
    loop = TrainingLoop(Hand(NullWorld(), job.spec), job, RecoveryState())
    assert loop.state()["rates"] == {}
