"""Which tasks can be stacked, and the reasons for those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.vectorized import Population, groups
from manyhands.vectorized.program_equality import network_difference

from .works import adamw, cross_entropy, task


def made_inside(lr: float = 1e-2, smoothing: float = 0.0, p: float = 0.1) -> mh.Task:
    """Everything is made in the function, as people write it."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(20, 4, generator=generator), torch.arange(20) % 2

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 2)),
        loss=loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=lr),
        data=(inputs, labels),
        batch_size=4,
    )


def test_tasks_that_differ_in_hyperparameters_are_grouped() -> None:
    tasks = [
        task("cnn", adamw(1e-2, weight_decay=0.1, betas=(0.5, 0.9)), seed=1, clip=1.0),
        task("cnn", adamw(2e-2), seed=2, schedule=lambda step, total: 0.5),
        task("cnn", adamw(3e-2), seed=3),
    ]
    assert [group.tasks for group in groups(tasks)] == [(0, 1, 2)]


def test_closures_created_per_task_are_compared_by_value() -> None:
    found = groups([made_inside(1e-2), made_inside(2e-2), made_inside(smoothing=0.1)])
    assert [group.tasks for group in found] == [(0, 1), (2,)]
    assert found[1].unlike == "loss uses smoothing, which is 0.0 in one and 0.1 in another"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (task(batch_size=4), "batch_size is 8 in one and 4 in another"),
        (task(optimizer=adamw(amsgrad=True)), "AdamW has amsgrad in one only"),
        (task(ema=0.9), "moving average"),
        (task(metrics={}), "metrics has accuracy in one only"),
        (
            task().replace(model=lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))),
            "1 is of type ReLU",
        ),
    ],
)
def test_reason_for_separate_groups_is_reported(other: mh.Task, words: str) -> None:
    found = groups([task(), other])
    assert [group.tasks for group in found] == [(0,), (1,)]
    assert words in found[1].unlike


class Reads(nn.Module):
    """Looks at a value in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.linear(inputs)
        return outputs * 2 if outputs.sum().item() > 0 else outputs


def normed() -> nn.Module:
    """A layer without a rule for stacks."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))


class Rows(torch.utils.data.Dataset[Any]):
    """Samples that must be read one by one."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(5), 0


@pytest.mark.parametrize(
    ("alone", "words"),
    [
        (task().replace(model=Reads), "outputs.sum().item()"),
        (task().replace(model=normed), "aten::div.out"),
        (task().replace(loss=None, step=lambda hand, batch: None), "a task with step="),
        (task(data=Rows(), valid=None, metrics={}), "arrays in memory, but got Rows"),
        (task(optimizer=lambda model: torch.optim.Adagrad(model.parameters())), "but got Adagrad"),
        (task().replace(loss=lambda model, batch: model(batch[0])), "a loss must be a scalar"),
        (
            task().replace(loss=lambda model, batch: cross_entropy(model, batch) * __import__("random").random()),
            "random, which would be the same for all",
        ),
    ],
)
def test_reason_for_an_unstackable_task_is_reported(alone: mh.Task, words: str) -> None:
    found = groups([alone, task(), task(seed=1)])
    assert [group.tasks for group in found] == [(1, 2), (0,)]
    assert found[0].stacks
    assert not found[1].stacks
    assert words in found[1].reason


def test_occasional_random_draws_are_detected_when_they_occur() -> None:
    asked: list[int] = []

    def rarely(model: nn.Module, batch: Any) -> Tensor:
        asked.append(1)
        outputs = model(batch[0])
        return F.cross_entropy(F.dropout(outputs, 0.5) if len(asked) > 12 else outputs, batch[1])

    population = Population([task(seed=seed).replace(loss=rarely) for seed in range(2)], device="cpu", epochs=4)
    asked[:] = []
    assert not population._way._program.is_random
    assert population.step(20).isfinite().all()
    assert population._way._program.is_random


class HoldsItsMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.activation = self.squashed

    def squashed(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def test_layers_that_hold_their_own_methods_are_compared() -> None:
    assert network_difference(HoldsItsMethod(), HoldsItsMethod()) == ""
