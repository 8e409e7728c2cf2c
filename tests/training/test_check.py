"""Check: equal strategies pass; a difference is found, named, and explained."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.core import StrategyError, StrategySpec

from .problems import problem


class Counting(nn.Module):
    """A network with an unsynchronized running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.register_buffer("seen", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean(0), 0.5)
        return self.layer(x)


class Centred(nn.Module):
    """Looks at the whole batch without being a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - x.mean(0) if self.training else x)


class Noisy(nn.Module):
    """Draws from a generator of its own, which no two processes have alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn(x.shape, generator=self.generator) * self.training)


def spread(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) + model(batch[0]).std()


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "gan"])
def test_check_reports_mirrored_first_step_as_equal(name: str) -> None:
    verdict = mh.check(problem(name, "adamw"), mh.Mirrored(2), on="cpu*2")
    assert verdict, str(verdict)
    assert verdict.error < 1e-10
    assert str(verdict).startswith("equal: replicas=2 takes the same first step")


@pytest.mark.parametrize(
    ("task", "strategy", "first", "why"),
    [
        (problem("cnn"), mh.Mirrored(2, batch_stats="local"), "the gradient of", 'use batch_stats="sync"'),
        (problem("cnn"), mh.Mirrored(2, accumulate=2), "the gradient of", "of a micro-batch under accumulate"),
        (
            problem("mlp").replace(model=Counting),
            mh.Mirrored(2, batch_stats="local"),
            "seen",
            r"not synchronized.*seen \(ranks 0, 1",
        ),
        (problem("mlp").replace(model=Centred), mh.Mirrored(2), "layer.weight", "looks at other samples of the batch"),
        (
            problem("mlp").replace(model=Noisy),
            mh.Mirrored(2),
            "layer.weight",
            "draws random numbers from a separate generator",
        ),
        (problem("mlp").replace(loss=spread), mh.Mirrored(2), "the gradient of 0.weight", "a loss must be a mean"),
    ],
    ids=["local statistics", "accumulated statistics", "a buffer", "the batch", "randomness", "the loss"],
)
def test_check_names_first_difference_and_its_cause(
    task: mh.Task, strategy: StrategySpec, first: str, why: str
) -> None:
    verdict = mh.check(task, strategy, on="cpu*2")
    assert not verdict
    assert first in verdict.first
    assert verdict.error > 1e-6
    assert re.search(why, verdict.why), verdict.why


@pytest.mark.parametrize("strategy", [mh.Mirrored(2), mh.Mirrored(3, accumulate=2, deterministic=True)], ids=str)
def test_check_compares_networks_with_dropout(strategy: StrategySpec) -> None:
    task = problem("mlp").replace(model=lambda: nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.5), nn.Linear(24, 5)))
    verdict = mh.check(task, strategy, on=f"cpu*{strategy.replicas}")
    assert verdict, str(verdict)
    assert verdict.error < 1e-10
    assert ("as with deterministic=True" in str(verdict)) is not strategy.deterministic


def test_check_detects_random_mixing_of_samples() -> None:
    """Which samples there are to mix with depends on the layout, whatever the numbers are."""

    class Mixed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x[torch.randperm(len(x))] if self.training else x)

    verdict = mh.check(problem("mlp").replace(model=lambda: Mixed(nn.Linear(12, 5))), mh.Mirrored(2), on="cpu*2")
    assert not verdict
    assert "0.weight" in verdict.first
    assert "looks at other samples of the batch" in verdict.why


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Linear(12, 8), nn.AdaptiveLogSoftmaxWithLoss(8, 11, [3, 6], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.out(torch.tanh(self.body(x)), y)


def test_check_refuses_a_network_that_runs_on_one_device_only() -> None:
    made = problem("mlp").replace(model=Adaptive, loss=lambda model, batch: model(batch[0], batch[1]).loss)
    with pytest.raises(StrategyError, match="must run as they do on one device.*at the backward pass"):
        mh.check(made, mh.TensorParallel(2), on="cpu*2")


class Replacing(torch.optim.Optimizer):
    """Descends by a new tensor for every parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 8, max_norm=0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x.abs().long() % 7).mean(1))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer": lambda model: Replacing(model.parameters())}, r"replaces the memory of .* \(p.data = ...\)"),
        ({"model": Table}, r"forward changes words.weight by embedding at test_check.py:\d+ .*does not synchronize"),
    ],
)
def test_check_names_how_parameters_change_where_updates_differ(changes: Any, text: str) -> None:
    verdict = mh.check(problem("mlp").replace(**changes), mh.Sharded(2, sharding="optimizer"), on="cpu*2")
    assert verdict.outcome == "different"
    assert re.search(text, verdict.why)
