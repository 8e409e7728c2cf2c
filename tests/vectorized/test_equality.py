"""A member of a population trains exactly as the same task alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.vectorized import Population, groups

from .works import KINDS, adamw, task

EPOCHS = 3


def alone(one: mh.Task, folder: Path, precision: str = "fp64", epochs: int = EPOCHS) -> Any:
    spec = mh.Single(deterministic=True, precision=precision)
    return mh.fit(one, spec, on="cpu", epochs=epochs, folder=folder, options=mh.options.Display(progress=False))


def follows(members: list[mh.Task], folder: Path, precision: str = "fp64", rtol: float = 1e-9) -> Population:
    """Trains all members together and each alone; compares every loss, the weights and what was measured."""
    runs = [alone(one, folder / str(number), precision) for number, one in enumerate(members)]
    population = Population(members, mh.Single(precision=precision), device="cpu", epochs=EPOCHS)
    curves = population.step(population.total)
    for number, run in enumerate(runs):
        expected = torch.tensor(run.losses, dtype=torch.float64)
        torch.testing.assert_close(curves[:, number], expected, rtol=rtol, atol=0.0)
        if precision == "fp64":
            for name, tensor in run.model().state_dict().items():
                torch.testing.assert_close(
                    population.model(number).state_dict()[name].double(), tensor.double(), rtol=0, atol=1e-9
                )
    for number, measured in enumerate(population.evaluate()):
        for name, value in measured.items():
            assert value == pytest.approx(runs[number].metrics[name], rel=max(rtol, 1e-9)), name
    return population


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_members_train_like_separate_runs(kind: str, tmp_path: Path) -> None:
    members = [
        task(kind, adamw(1e-2), seed=0),
        task(kind, adamw(3e-3, weight_decay=0.3), seed=1),
        task(kind, adamw(3e-2, betas=(0.8, 0.95), eps=1e-6), seed=2, clip=0.5),
        task(kind, adamw(1e-2), seed=0, schedule=lambda step, total: 1 - step / total),
    ]
    follows(members, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_members_train_like_separate_runs_in_fp32(kind: str, tmp_path: Path) -> None:
    sgd = [lambda model, lr=lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.01, 0.05)]
    follows([task(kind, sgd[0], seed=5), task(kind, sgd[1], seed=6)], tmp_path, "fp32", 1e-4)


class Lion(torch.optim.Optimizer):
    """As its authors wrote it."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum: Tensor = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                first, second = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((momentum * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


OPTIMIZERS: dict[str, list[Any]] = {
    "sgd": [
        lambda m, lr=lr, w=w: torch.optim.SGD(m.parameters(), lr=lr, weight_decay=w) for lr, w in ((0.1, 0), (0.2, 0.1))
    ],
    "momentum": [
        lambda m, lr=lr, d=d: torch.optim.SGD(m.parameters(), lr=lr, momentum=lr, dampening=d)
        for lr, d in ((0.1, 0.3), (0.2, 0))
    ],
    "nesterov": [
        lambda m, lr=lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=lr)
        for lr in (0.01, 0.02)
    ],
    "adam": [lambda m, lr=lr: torch.optim.Adam(m.parameters(), lr=lr, weight_decay=lr) for lr in (0.01, 0.02)],
    "amsgrad": [lambda m, lr=lr: torch.optim.AdamW(m.parameters(), lr=lr, amsgrad=True) for lr in (0.01, 0.02)],
    "maximize": [lambda m, lr=lr: torch.optim.Adam(m.parameters(), lr=lr, maximize=True) for lr in (0.001, 0.002)],
    "rmsprop": [lambda m, lr=lr: torch.optim.RMSprop(m.parameters(), lr=lr, alpha=1 - lr) for lr in (0.01, 0.02)],
    "rmsprop, centred": [
        lambda m, lr=lr: torch.optim.RMSprop(m.parameters(), lr=lr, centered=True, momentum=0.5, weight_decay=lr)
        for lr in (0.01, 0.02)
    ],
    "lion": [lambda m, lr=lr: Lion(m.parameters(), lr=lr, weight_decay=lr) for lr in (0.01, 0.02)],
    "groups": [
        lambda m, lr=lr: torch.optim.AdamW(
            [{"params": [m[0].weight], "lr": lr}, {"params": [m[0].bias, *m[2].parameters()], "weight_decay": 0.5}],
            lr=2 * lr,
        )
        for lr in (0.01, 0.02)
    ],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_members_match_separate_runs_for_every_optimizer(name: str, tmp_path: Path) -> None:
    follows([task("mlp", optimizer, seed=seed) for seed, optimizer in enumerate(OPTIMIZERS[name])], tmp_path)


@pytest.mark.parametrize("kind", ["plain", "attention"])
def test_members_may_have_different_dropout_probabilities(kind: str, tmp_path: Path) -> None:
    def net(p: float) -> nn.Module:
        if kind == "plain":
            return nn.Sequential(nn.Linear(5, 16), nn.Dropout(p), nn.ReLU(), nn.Dropout(p / 2), nn.Linear(16, 3))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True)
        whole = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(9, 8), whole, nn.Flatten(), nn.Linear(56, 3))

    def one(p: float, seed: int) -> mh.Task:
        return task("mlp" if kind == "plain" else "transformer", seed=seed).replace(model=lambda: net(p))

    members = [one(0.1, 0), one(0.5, 1), one(0.3, 0)]
    assert [group.tasks for group in groups([*members, one(0.0, 0)])] == [(0, 1, 2), (3,)]
    follows(members, tmp_path)


def test_frozen_parameters_and_random_losses_match_separate_runs(tmp_path: Path) -> None:
    def network() -> torch.nn.Module:
        made = KINDS["mlp"][0]()
        made[0].requires_grad_(False)
        return made

    def noisy(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        inputs = batch[0] + 0.1 * torch.randn_like(batch[0]) + 0.1 * torch.rand(len(batch[0]), 1)
        return F.cross_entropy(model(inputs), batch[1])

    members = [
        task("mlp", adamw(1e-2, weight_decay=0.1), seed=seed, ema=0.9).replace(model=network, loss=noisy, metrics={})
        for seed in (1, 2)
    ]
    population = follows(members, tmp_path)
    held = population.state(0)["optimizers"][""]["groups"][0]["params"]
    assert held == [name for name, _ in network().named_parameters()]  # as torch's own state names them


def test_members_train_on_a_subset_of_arrays(tmp_path: Path) -> None:
    whole = torch.utils.data.TensorDataset(*task("mlp").data)
    some = torch.utils.data.Subset(whole, list(range(0, 40, 2)))
    follows([task("mlp", adamw(lr), data=some, seed=seed) for seed, lr in enumerate((1e-2, 2e-2))], tmp_path)
