"""Members are added, removed, fail and resume without an effect on the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import CheckpointError, TaskError, UsageError
from manyhands.storage import Checkpoint, CheckpointStore
from manyhands.vectorized import Population

from ..grouped_options import fit_options
from .test_equality import EPOCHS, alone
from .works import NUM_ROWS, adamw, cross_entropy, task

STEPS = 6
"""Batches of a pass."""


def curve(run: Any) -> Tensor:
    return torch.tensor(run.losses, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_adding_and_stopping_members_does_not_change_other_members(kind: str, tmp_path: Path) -> None:
    tasks = [task(kind, adamw(1e-2), seed=seed) for seed in range(3)]
    later = task(kind, adamw(2e-2), seed=7)
    population = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=EPOCHS)
    first = population.step(4)
    population.stop(1)
    second = population.step(3)
    population.replace(1, later)
    third = population.step(population.total)
    assert [member.status for member in population.members] == ["done"] * 3
    assert second[:, 1].isnan().all()
    runs = [alone(one, tmp_path / str(number)) for number, one in enumerate([tasks[0], later, tasks[2]])]
    for number in (0, 2):
        together = torch.cat([first, second, third])[:, number]
        torch.testing.assert_close(together[~together.isnan()], curve(runs[number]), rtol=1e-9, atol=0)
    torch.testing.assert_close(third[:, 1], curve(runs[1]), rtol=1e-9, atol=0)
    for number, run in enumerate(runs):
        for name, tensor in run.model().state_dict().items():
            torch.testing.assert_close(population.model(number).state_dict()[name], tensor, rtol=0, atol=1e-9)


def test_member_and_run_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    tasks = [task("cnn", adamw(1e-2), seed=seed, ema=0.9) for seed in range(2)]
    whole = alone(tasks[1], tmp_path / "whole")
    population = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=EPOCHS)
    before = population.step(8)
    state = population.state(1)

    spec = mh.Single(deterministic=True, precision="fp64")
    settings: Any = {"on": "cpu", "epochs": EPOCHS, "folder": tmp_path, "progress": False}
    mh.fit(tasks[1], spec, **fit_options(steps=8, name="half", **settings))
    with CheckpointStore(tmp_path / "half" / "checkpoints") as store:
        saved = store.load()
    with CheckpointStore(tmp_path / "alone" / "checkpoints") as store:
        store.save(Checkpoint(**state))
    run = mh.fit(tasks[1], spec, **fit_options(name="alone", resume=True, **settings))
    torch.testing.assert_close(curve(run)[8:], curve(whole)[8:], rtol=1e-9, atol=0)

    other = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=EPOCHS)
    other.replace(0, tasks[1])
    other.load(0, vars(saved))
    other.load(1, state)
    after = other.step(population.total - 8)
    for number in (0, 1):
        torch.testing.assert_close(after[:, number], curve(whole)[8:], rtol=1e-9, atol=0)
    torch.testing.assert_close(before[:, 1], curve(whole)[:8], rtol=1e-9, atol=0)
    for name, tensor in whole.model().state_dict().items():
        for model in (run.model(), other.model(0), other.model(1)):
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-9)


def test_report_callback_may_stop_and_replace_members_every_epoch(tmp_path: Path) -> None:
    tasks = [task("mlp", adamw(lr), seed=seed) for seed, lr in enumerate((1e-2, 1e-3, 3e-2))]
    fresh = task("mlp", adamw(5e-3), seed=9)
    population = Population(tasks, device="cpu", epochs=EPOCHS)
    heard: list[tuple[int, int]] = []
    measured: dict[int, dict[str, float]] = {}

    def report(number: int, step: int, metrics: dict[str, float]) -> None:
        heard.append((number, step))
        measured[number] = metrics
        if (number, step) == (1, STEPS) and heard.count((1, STEPS)) == 1:
            population.stop(1)
            population.replace(1, fresh)

    population.train(report=report)
    assert sorted(heard) == sorted(
        [(n, STEPS * epoch) for n in (0, 2) for epoch in (1, 2, 3)] + [(1, STEPS)] + [(1, STEPS * e) for e in (1, 2, 3)]
    )
    runs = [alone(one, tmp_path / str(n), "fp32") for n, one in enumerate([tasks[0], fresh, tasks[2]])]
    for number, run in enumerate(runs):
        assert measured[number]["valid_loss"] == pytest.approx(run.metrics["valid_loss"], rel=1e-4)
        assert measured[number]["valid_accuracy"] == pytest.approx(run.metrics["valid_accuracy"])
        assert measured[number]["loss"] == pytest.approx(sum(run.losses[-STEPS:]) / STEPS, rel=1e-4)


def test_train_until_step_reports_at_the_given_interval() -> None:
    population = Population([task("mlp", seed=seed) for seed in range(2)], device="cpu", epochs=EPOCHS)
    heard: list[tuple[int, int]] = []
    population.train(until=7, every=3, report=lambda number, step, metrics: heard.append((number, step)))
    assert heard == [(0, 3), (1, 3), (0, 6), (1, 6), (0, 7), (1, 7)]
    assert all(member.is_training for member in population.members)


def test_member_with_non_finite_loss_does_not_fail_other_members(tmp_path: Path) -> None:
    def sgd(lr: float) -> Any:
        return lambda model: torch.optim.SGD(model.parameters(), lr=lr)

    tasks = [task("mlp", sgd(lr), seed=seed) for seed, lr in enumerate((0.1, 1e30, 0.2))]
    population = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=EPOCHS)
    reported: dict[int, int] = {}
    population.train(report=lambda number, step, metrics: reported.__setitem__(number, step))
    assert [member.status for member in population.members] == ["done", "failed", "done"]
    assert "at step" in population.members[1].reason
    assert reported[1] == population.members[1].step < population.total
    for number in (0, 2):
        run = alone(tasks[number], tmp_path / str(number))
        assert population.members[number].loss == pytest.approx(run.losses[-1], rel=1e-9)


def test_each_member_skips_its_own_non_finite_steps(tmp_path: Path) -> None:
    inputs, labels = (tensor.clone() for tensor in task("mlp").data)
    inputs[5] = math.inf
    data = (inputs, labels)
    tasks = [task("mlp", adamw(1e-2), seed=seed, not_finite="skip", data=data, valid=None) for seed in range(2)]
    population = Population(tasks, mh.Single(precision="fp64"), device="cpu", epochs=EPOCHS)
    curves = population.step(population.total)
    for number, one in enumerate(tasks):
        run = alone(one, tmp_path / str(number))
        assert sum(math.isnan(loss) for loss in run.losses) == EPOCHS
        torch.testing.assert_close(curves[:, number], curve(run), rtol=1e-9, atol=0, equal_nan=True)


def test_members_that_exceed_memory_are_computed_in_chunks(tmp_path: Path) -> None:
    calls: list[int] = []

    def hungry(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) in (8, 9):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return cross_entropy(model, batch)

    notices: list[str] = []
    tasks = [task("cnn", adamw(lr), seed=seed) for seed, lr in enumerate((1e-2, 2e-2, 3e-2, 4e-2, 5e-2))]
    starved = [one.replace(loss=hungry) for one in tasks]
    spec = mh.Single(precision="fp64", deterministic=True)
    population = Population(starved, spec, device="cpu", epochs=EPOCHS, notice=notices.append)
    plenty = Population(tasks, spec, device="cpu", epochs=EPOCHS)
    calls.clear()
    torch.testing.assert_close(population.step(12), plenty.step(12), rtol=1e-9, atol=0)
    assert notices == [
        "5 members do not fit into memory together: 3 are computed at a time",
        "3 members do not fit into memory together: 2 are computed at a time",
    ]


def test_invalid_input_is_rejected_with_the_reason() -> None:
    good = task("mlp")
    with pytest.raises(UsageError, match="a population needs at least one task"):
        Population([], device="cpu")
    with pytest.raises(TaskError, match=r"member 1, where 0\.weight is \(16, 5\) in one and \(8, 5\) in another"):
        Population([good, good.replace(model=lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))])
    with pytest.raises(UsageError, match="one device"):
        Population([good], mh.Mirrored(2), device="cpu")
    population = Population([good], device="cpu")
    with pytest.raises(UsageError, match="the number of a member must be between 0 and 0, but got 3"):
        population.stop(3)
    with pytest.raises(TaskError, match="the optimizer is AdamW in one and SGD in another"):
        population.replace(0, task("mlp", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)))
    net = nn.Linear(5, 3)
    with pytest.raises(TaskError, match="must build a new network each time"):
        Population([task(seed=seed).replace(model=lambda: net) for seed in range(2)], device="cpu")
    other = Population([task("cnn")], device="cpu").state(0)
    with pytest.raises(CheckpointError, match="must match its network"):
        population.load(0, other)
    assert NUM_ROWS % 8
